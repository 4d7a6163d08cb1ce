"""The sources that `write_set` knows. A new one is one file beside this one and one line in `SOURCES`."""

from __future__ import annotations

import difflib

from shards.sources import dci, ifct, openmoji, pairs
from shards.sources.base import Source

SOURCES: dict[str, Source] = {
    source.name: source for source in (dci.SOURCE, ifct.SOURCE, openmoji.SOURCE, pairs.SOURCE)
}


def get_source(name: str) -> Source:
    """The source called `name`.

    Raises:
        ValueError: There is none; the message names the nearest and all.
    """
    if name in SOURCES:
        return SOURCES[name]
    near = difflib.get_close_matches(name, SOURCES, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ValueError(f"unknown data set {name!r}{hint} Known: {', '.join(SOURCES)}")
