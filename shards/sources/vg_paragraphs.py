"""Visual Genome paragraphs: one paragraph for each of about 19,600 pictures; people train on it for Urban-1K.

    paragraphs_v1.json              [{"image_id", "paragraph", "url": ".../VG_100K_2/2388350.jpg"}, ...]
    {train,val,test}_split.json     lists of image ids (about 14.6k, 2.5k, 2.5k)
    VG_100K/, VG_100K_2/            pictures, <image_id>.jpg; the url says in which folder
    images.zip, images2.zip         the same, unopened

Some pictures have two paragraphs. Urban-1K's pictures come from here under other names: `pipeline shards overlap`
compares the pictures themselves.
"""

from __future__ import annotations

from typing import Any

from shards.names import split_path
from shards.pair import Entry
from shards.sources.base import UNLISTED, Reading, Request, Source, splits_option, wanted_splits
from shards.sources.files import Files
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in
from shards.sources.table import parse_json, parse_rows

NEEDS = (
    "paragraphs_v1.json and {train,val,test}_split.json (cs.stanford.edu/people/ranjaykrishna/im2p), and VG_100K and "
    "VG_100K_2 or images.zip and images2.zip (homes.cs.washington.edu/~ranjay/visualgenome), in data/vg-paragraphs or "
    "SOURCE; the pictures may be elsewhere, as IMAGES"
)
_SPLITS = ("train", "val", "test")


def read(request: Request) -> Reading:
    """Read paragraphs and splits, then the pictures of both folders."""
    files = Files(request, "vg-paragraphs", NEEDS, ("paragraphs_v1.json.zip",))
    pictures = files.pictures("VG_100K", "VG_100K_2", "images.zip", "images2.zip")
    name, paragraphs = files.main("paragraphs_v1.json")
    split_of = {str(id): split for split in _SPLITS for id in _ids(files, split)}
    wanted = wanted_splits(request)

    def draft(row: dict[str, Any]) -> Draft | None:
        id = name_in(row, "image_id")
        split = split_of.get(id, UNLISTED)
        image = "/".join(split_path(name_in(row, "url"))[-2:]) if "url" in row else f"{id}.jpg"
        entry = Entry(id, captions_in(row, "paragraph"), split, {"image": image})
        return (image, entry) if split in wanted else None

    return joined(pictures, make_drafts(parse_rows(paragraphs, name), draft, "row"))


def _ids(files: Files, split: str) -> list[int | str]:
    name, data = files.one(f"{split}_split.json")
    ids = parse_json(data, name)
    if not isinstance(ids, list):
        raise ValueError(f"{name} is no list of image ids")
    return ids


SOURCE = Source(
    name="vg-paragraphs",
    summary="Visual Genome paragraphs: the training set for Urban-1K",
    licence="CC BY 4.0 (Visual Genome); pictures from Flickr under their own licences",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options={"splits": splits_option(*_SPLITS, UNLISTED)},
)
