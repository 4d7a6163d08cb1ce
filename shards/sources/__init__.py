"""The sources that `write_set` knows. A new one is one file beside this one and one line in `SOURCES`."""

from __future__ import annotations

import difflib

from shards.sources import (
    coco,
    dci,
    detailcaps,
    docci,
    flags,
    flickr30k,
    goal_json,
    ifct,
    iiw,
    long_dci,
    openmoji,
    pairs,
    parquet,
    sharegpt4v,
    sketchy,
    structxlip_json,
    urban1k,
    vg_paragraphs,
    webdataset,
)
from shards.sources.base import Source

_MODULES = (
    *(docci, dci, long_dci, urban1k, vg_paragraphs, sharegpt4v, iiw, detailcaps, sketchy, coco, flickr30k),
    *(goal_json, structxlip_json, pairs, webdataset, parquet, openmoji, ifct, flags),
)
SOURCES: dict[str, Source] = {module.SOURCE.name: module.SOURCE for module in _MODULES}


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
