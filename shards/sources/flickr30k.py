"""Flickr30k: 31,783 photographs with five short captions each, by Karpathy's list or by its own.

dataset_flickr30k.json     Karpathy: 29,000 train, 1014 val, 1000 test
results_20130124.token     its own: "1000092795.jpg#0<TAB>caption" a line, without splits
flickr30k-images/          N.jpg, as shipped with macOS's ._N.jpg and __MACOSX/ beside them; or flickr30k-images.tar.gz
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shards.names import stem
from shards.pair import Entry
from shards.sources import karpathy
from shards.sources.base import Option, Reading, Request, Source, splits_option, wanted_splits
from shards.sources.files import Files
from shards.sources.rows import Draft, joined, make_drafts, name_in, split_in
from shards.sources.table import Row, decode_text

NEEDS = (
    f"dataset_flickr30k.json, {karpathy.NEEDS}, or results_20130124.token, and flickr30k-images "
    "(shannon.cs.illinois.edu/DenotationGraph, asks for consent), in data/flickr30k or SOURCE, or the latter as IMAGES"
)

SPLITS = ("train", "val", "test")


def read(request: Request) -> Reading:
    """Read the list, then the photographs in one pass."""
    files = Files(request, "flickr30k", NEEDS, ("caption_datasets.zip", "flickr30k.tar.gz"))
    pictures = files.pictures("flickr30k-images", "flickr30k_images", "flickr30k-images.tar.gz", "flickr30k-images.zip")
    wanted = wanted_splits(request)

    def draft(image: dict[str, Any]) -> Draft | None:
        name, split = name_in(image, "filename"), split_in(image, SPLITS)
        return (name, Entry(stem(name), karpathy.sentences(image), split)) if split in wanted else None

    if request.options["list"] == "token":
        rows = _token_rows(*files.main("results_20130124.token"), wanted)
        return joined(pictures, make_drafts(rows, draft))
    return joined(pictures, make_drafts(karpathy.karpathy_rows(*files.main("dataset_flickr30k.json")), draft, "image"))


def _token_rows(name: str, data: bytes, wanted: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    """Each caption of the native file as a row of Karpathy's form. All are one split, the one asked for or test."""
    split = wanted[0] if len(wanted) == 1 else "test"
    for number, line in enumerate(decode_text(data, name).split("\n"), start=1):
        key, tab, caption = line.removesuffix("\r").partition("\t")
        if tab:
            yield number, {"filename": key.rpartition("#")[0], "split": split, "sentences": [{"raw": caption}]}
        elif line.strip():
            yield number, f"no tab between picture and caption: {line[:60]!r}"


SOURCE = Source(
    name="flickr30k",
    summary="Flickr30k: 31,783 photographs with five short captions each",
    licence="non-commercial research and education only (Flickr's terms)",
    needs=NEEDS,
    read=read,
    takes_images=True,
    published={"train": 29_000, "val": 1014, "test": 1000},
    options={
        "list": Option("karpathy", "whose list of captions; token has no splits, all is test", ("karpathy", "token")),
        "splits": splits_option(*SPLITS),
    },
)
