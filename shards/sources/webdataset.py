"""WebDataset tars: files of one name and several extensions, beside each other, are one sample.

    000000012.jpg    the picture: jpg, png, webp or another, or the one extension that ends like these ("full.jpg")
    000000012.txt    a caption
    000000012.json   captions under a well-known key, and whatever else is known of the picture

Tars are read front to back through the webdataset library, one by one. What a JSON says else is the meta.
Tars of `pipeline shards to-webdataset`, <split>-NNNNNN.tar with `id`, `captions` and `meta` in each JSON, give back the
pairs that they were made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from shards.location import Location
from shards.names import stem
from shards.pair import Item, Pair, Rejected
from shards.sources.base import Option, Reading, Request, Source, source_files
from shards.sources.pairs import CAPTION_KEYS
from shards.sources.rows import captions_in, name_in
from shards.sources.splits import split_of, split_option
from shards.sources.table import decode_text, parse_json
from shards.sources.tar_samples import Sample, read_samples

NEEDS = (
    "SOURCE=tars: a file, a folder of them, or a pattern such as data/laion/{00000..00063}.tar or "
    "https://host/set/{0000..0127}.tar"
)
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")

_OWN = re.compile(r"(.+)-\d{6}\.tar")


def read(request: Request) -> Reading:
    """Read every tar once, in the order of their names."""
    tars = source_files(request, "webdataset", NEEDS, ".tar", ".tar.gz", ".tgz")
    return Reading.of([partial(_items, tar, request.options) for tar in tars])


def _items(tar: Location, options: Mapping[str, str]) -> Iterator[Item]:
    for sample in read_samples(tar):
        key = sample["__key__"]
        try:
            yield _pair(sample, tar.name, options)
        except ValueError as error:
            known = None if options["split"] == "hash" else split_of(options["split"], tar.name, key)
            yield Rejected(f"{tar.name}: {key}", str(error), known)


def _pair(sample: Sample, tar: str, options: Mapping[str, str]) -> Pair:
    described = _json(sample)
    image = sample[_picture(sample, options["image_key"])]
    own = {"id", "captions", "meta"} <= described.keys() and isinstance(described["meta"], dict)
    id = name_in(described, "id") if own and not options["id_key"] else _id(sample, described, tar, options["id_key"])
    captions, key = _captions(sample, described, options["caption_key"])
    written = _OWN.fullmatch(tar) if own and not options["split"] else None
    split = written.group(1) if written else split_of(options["split"], tar, id)
    meta = described["meta"] if own else {name: value for name, value in described.items() if name != key}
    return Pair(id, image, captions, split, meta)


def _json(sample: Sample) -> dict[str, Any]:
    if "json" not in sample:
        return {}
    value = parse_json(sample["json"], "its .json")
    if not isinstance(value, dict):
        raise ValueError(f"its .json holds a JSON {type(value).__name__}, not an object")
    return value


def _picture(sample: Sample, stated: str) -> str:
    """The extension of the picture."""
    known = (stated.lower(),) if stated else PICTURES
    found = [extension for extension in known if extension in sample]
    if not found and not stated:
        found = [extension for extension in _extensions(sample) if extension.rpartition(".")[2] in PICTURES]
        if len(found) > 1:
            raise ValueError(f"several pictures: {', '.join(found)}; state image_key")
    if not found:
        raise ValueError(f"no picture{f' .{stated}' if stated else ''} among {', '.join(_extensions(sample))}")
    return found[0]


def _captions(sample: Sample, described: dict[str, Any], stated: str) -> tuple[list[str], str | None]:
    """The captions, and the key of the JSON that they were under, if they were."""
    extension, _, key = stated.partition(":")
    extension = extension.lower()
    if key:
        return captions_in(described, key), key
    if isinstance(described.get("captions"), list) and not stated:
        return captions_in(described, "captions"), "captions"
    if (extension or "txt") in sample:
        return [decode_text(sample[extension or "txt"], f"its .{extension or 'txt'}")], None
    known = next((name for name in CAPTION_KEYS if name in described), None)
    if stated or known is None:
        raise ValueError(
            f"no caption{f' .{stated}' if stated else ''} among {', '.join(_extensions(sample))}"
            + (f"; its .json has {', '.join(described)}" if described else "")
        )
    return captions_in(described, known), known


def _id(sample: Sample, described: dict[str, Any], tar: str, stated: str) -> str:
    if stated == "tar":
        return f"{stem(tar)}/{sample['__key__']}"
    return name_in(described, stated.removeprefix("json:")) if stated else str(sample["__key__"])


def _extensions(sample: Sample) -> list[str]:
    return [name for name in sample if not name.startswith("__")]


SOURCE = Source(
    name="webdataset",
    summary="pairs in WebDataset tars, local or elsewhere",
    licence="that of the tars: as their publisher states",
    needs=NEEDS,
    read=read,
    options={
        "image_key": Option("", f"extension of pictures; found by itself among {', '.join(PICTURES)}"),
        "caption_key": Option(
            "", "extension of captions, or json:KEY; without it, a list `captions` in the .json, .txt, a known key"
        ),
        "id_key": Option("", "json:KEY, or tar (its name and the key) where keys repeat; without it, the key"),
        "split": split_option(),
    },
)
