"""GOAL's JSON lists: how dense-caption papers hand each other their pairs.

    test     [{"filename", "caption"}, ...]
    train    [{"original_filename", "original_caption",
               "segment": [{"filename", "caption", "similarity_score",
                            "bbox_coordinates": {x1, y1, x2, y2, width, height}}, ...]}, ...]
    crops    [{"filename", "caption", "similarity_score", "bbox_coordinates"}, ...]: test-like, of pictures cut out

The paths are those of the authors' machines; pictures are found in IMAGES by as much of the path as agrees, at least
the name. Several captions of one picture are several rows. StructXLIP's lists (`structxlip-json`) are read here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shards.location import Location, location
from shards.names import path_id, stem
from shards.pair import Entry, Rejected
from shards.sources.base import Option, Reading, Request, Source, announce
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in, present
from shards.sources.table import Row, read_rows
from shards.store import open_store

NEEDS = (
    "a list as SOURCE (train where its rows have segments, else test), or lists as OPTIONS='train=a.json test=b.json'; "
    "and IMAGES=folder, tar or zip with the pictures. GOAL's lists are in datasets/ of its repository"
)
SPLITS = ("train", "val", "test")
IMAGE_KEYS = ("original_filename", "filename")
CAPTION_KEYS = ("original_caption", "caption")


def read(request: Request) -> Reading:
    """Read the lists, then the pictures in one pass."""
    return read_lists(request, "goal-json", NEEDS, IMAGE_KEYS)


def read_lists(request: Request, name: str, needs: str, image_keys: Sequence[str]) -> Reading:
    """Read the lists that a request states; of `image_keys`, columns of picture paths, the first one there counts."""
    lists: dict[str, Location] = {split: location(path) for split in SPLITS if (path := request.options[split])}
    if bool(request.source) == bool(lists):
        raise ValueError(f"{name} takes either SOURCE or lists by option. It needs: {needs}")
    if request.images is None:
        raise ValueError(f"{name} takes no list without IMAGES. It needs: {needs}")
    id_of = path_id if request.options["id"] == "path" else stem
    drafts: list[Draft | Rejected] = []
    for split, place in [("", request.source)] if request.source else lists.items():
        if not place.is_file():
            raise FileNotFoundError(f"{place} is not a file. {name} needs: {needs}")
        rows = list(read_rows(place))
        make = partial(_draft, split=split or _split_of(rows), image_keys=image_keys, id_of=id_of)
        drafts += make_drafts(rows, make, f"{place.name}, row")
    announce(name, request.source, request.images, *lists.values())
    return joined(open_store(request.images), drafts)


def list_options() -> dict[str, Option]:
    """The options of a source that `read_lists` reads."""
    lists = {split: Option("", f"a list of {split} pairs, in place of SOURCE", is_path=True) for split in SPLITS}
    return {
        **lists,
        "id": Option("name", "what a pair is called by: its picture's name or whole path", ("name", "path")),
    }


def _split_of(rows: list[tuple[int, Row]]) -> str:
    return "train" if any("segment" in row for _, row in rows if isinstance(row, dict)) else "test"


def _draft(row: dict[str, Any], split: str, image_keys: Sequence[str], id_of: Callable[[str], str]) -> Draft:
    image = name_in(row, _first(row, image_keys))
    captions = captions_in(row, _first(row, CAPTION_KEYS))
    meta: dict[str, Any] = {"image": image} | present(row, "similarity_score", "original_filename_structure")
    if "bbox_coordinates" in row:
        meta["box"] = _box(row)
    if "segment" in row:
        meta["regions"] = [_region(segment) for segment in row["segment"]]
    return image, Entry(id_of(image), captions, split, meta)


def _first(row: dict[str, Any], keys: Sequence[str]) -> str:
    return next((key for key in keys if key in row), keys[0])


def _region(segment: dict[str, Any]) -> dict[str, Any]:
    """A cut-out with its own caption. `file` is the crop that the authors saved; `box` gives the same pixels."""
    region = {"caption": captions_in(segment, "caption")[0], "box": _box(segment), "file": name_in(segment, "filename")}
    return region | present(segment, "similarity_score", "filename_structure_cropped")


def _box(segment: dict[str, Any]) -> list[float]:
    """[left, top, right, bottom] in pixels."""
    corners = segment.get("bbox_coordinates")
    if not isinstance(corners, dict) or not {"x1", "y1", "x2", "y2"} <= corners.keys():
        raise ValueError(f"'bbox_coordinates' is {corners!r}, not a box with x1, y1, x2, y2")
    return [corners[key] for key in ("x1", "y1", "x2", "y2")]


SOURCE = Source(
    name="goal-json",
    summary="pairs in GOAL's JSON lists: test, crops, or train with segments and boxes",
    licence="that of the pictures and captions listed",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options=list_options(),
)
