"""DCI (Densely Captioned Images): 7805 SA-1B photographs with human descriptions of a hundred words and more.

Official layout, as a folder, as its parent, or as dci.tar.gz:

    densely_captioned_images/
      annotations/NNNNNN-data.json   one photograph each, joined on its field "image" ("sa_N.jpg")
      splits.json                    {"train": [...], "valid": [...], "test": [...]}: names of annotation files
      photos/                        empty as shipped; the photographs are SA-1B's sa_000138.tar

GOAL, StructXLIP and their followers split DCI otherwise: 75 of the 112 official test photographs are in GOAL's training
list. The options `goal_train` and `goal_test` state its lists, and then only they say what is written to which split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from shards.location import Location, location
from shards.names import stem
from shards.pair import Entry, Rejected
from shards.sources.base import UNLISTED, Option, Reading, Request, Source
from shards.sources.files import Files
from shards.sources.rows import Draft, joined, name_in
from shards.sources.table import parse_json, read_rows
from shards.store import Store

NEEDS = (
    "dci.tar.gz (https://dl.fbaipublicfiles.com/densely_captioned_images/dci.tar.gz, free), unpacked or not, in "
    "data/dci or as SOURCE; and SA-1B's sa_000138.tar (ai.meta.com/datasets/segment-anything-downloads, asks for "
    "consent), unpacked or not, beside annotations/, in photos/, or as IMAGES"
)
ARCHIVES = ("dci.tar.gz",)

_SPLIT_NAMES = {"valid": "val"}
_ALSO_SEEN = "The following can also be seen in the image:"

Annotation = dict[str, Any] | str
"""The words and boxes of one photograph, or why they cannot be read."""


def read(request: Request) -> Reading:
    """Read every annotation (short texts), then the photographs in one pass."""
    files = Files(request, "dci", NEEDS, ARCHIVES)
    photos = photo_store(files)
    splits, annotations = read_annotations(files)
    goal = {split: path for split in ("train", "test") if (path := request.options[f"goal_{split}"])}
    if goal:
        splits = _goal_splits(goal, annotations)
    absent = sorted(splits.keys() - annotations.keys())
    drafts: list[Draft | Rejected] = [
        Rejected(file, "in the splits, but not in annotations/", splits[file]) for file in absent
    ]
    for file, annotation in sorted(annotations.items()):
        if file in splits or not goal:
            drafts.append(draft(file, annotation, splits.get(file, UNLISTED), request.options["caption"]))
    return joined(photos, drafts)


def photo_store(files: Files) -> Store:
    """The photographs: in photos/ or SA-1B's tar beside the annotations, or where IMAGES says."""
    places = ("photos", "sa_000138.tar")
    return files.pictures(*places, *(f"densely_captioned_images/{place}" for place in places))


def read_annotations(files: Files) -> tuple[dict[str, str], dict[str, Annotation]]:
    """The split of each annotation file, and its slim content or the reason for none."""
    splits: dict[str, str] | None = None
    annotations: dict[str, Annotation] = {}
    for path, data in files.all("annotations/*.json", "splits.json"):
        name = PurePosixPath(path).name
        if name == "splits.json":
            listed = parse_json(data, path, "test")
            splits = {file: _SPLIT_NAMES.get(split, split) for split, names in listed.items() for file in names}
        else:
            try:
                annotations[name] = _slim(json.loads(data))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                annotations[name] = f"annotation cannot be read: {error!r}"
    if not annotations:
        raise ValueError(files.lacks("annotations/*.json"))
    if splits is None:
        raise ValueError(files.lacks("splits.json beside annotations/"))
    return splits, annotations


def _goal_splits(lists: dict[str, str], annotations: dict[str, Annotation]) -> dict[str, str]:
    """The split of each annotation file whose photograph is in one of GOAL's lists, which name files after sa_N."""
    file_of = {stem(slim["image"]): file for file, slim in annotations.items() if isinstance(slim, dict)}
    splits: dict[str, str] = {}
    for split, path in lists.items():
        for id in dict.fromkeys(_photographs(location(path))):
            file = file_of.get(id, id)
            if splits.setdefault(file, split) != split:
                raise ValueError(f"{id} is in GOAL's list of {splits[file]} and in that of {split}: state other lists")
    return splits


def _photographs(path: Location) -> Iterable[str]:
    """The photographs that a list names, be it of pictures or of crops ("sa_1.jpg_results/sa_1_max_37.png")."""
    for number, row in read_rows(path):
        name = str(row.get("original_filename") or row.get("filename")) if isinstance(row, dict) else row
        found = re.search(r"sa_\d+", name)
        if found is None:
            raise ValueError(
                f"{path}, row {number}: {name!r} names no photograph of SA-1B; is it a list of GOAL's for DCI?"
            )
        yield found.group()


def _slim(annotation: dict[str, Any]) -> dict[str, Any]:
    """Keep the words and boxes; nearly all of a file is base64 masks, and 7805 of those do not fit in memory."""
    masks = [mask for mask in annotation["mask_data"].values() if mask["mask_quality"] != 2]
    return {
        "image": name_in(annotation, "image"),
        "short": annotation.get("short_caption") or "",
        "extra": annotation.get("extra_caption") or "",
        "masks": [_mask_text(mask) for mask in masks],
        "regions": [
            {"caption": _mask_text(mask), "box": _box(mask["bounds"])} for mask in masks if mask["mask_quality"] == 0
        ],
    }


def _mask_text(mask: dict[str, Any]) -> str:
    """Quality 0 has a label and a caption, quality 1 (uninteresting) a label only, quality 2 (bad) nothing."""
    return mask["label"] if mask["mask_quality"] == 1 else f"{mask['label']}: {mask['caption']}"


def _box(bounds: Any) -> list[int]:
    """[left, top, right, bottom] in pixels, from the form that the README shows or the one that the code reads."""
    if isinstance(bounds, dict):
        first, second = bounds["topLeft"], bounds["bottomRight"]
        return [first["x"], first["y"], second["x"], second["y"]]
    (left, top), (right, bottom) = bounds
    return [left, top, right, bottom]


def draft(file: str, slim: Annotation, split: str, kind: str) -> Draft | Rejected:
    """An annotation as a draft with the caption of this kind."""
    if isinstance(slim, str):
        return Rejected(file, slim, split)
    id = stem(slim["image"])
    caption = _caption(slim, kind)
    if not caption.strip():
        return Rejected(id, f"empty {kind} caption in {file}", split)
    return slim["image"], Entry(id, [caption], split, {"annotation": file, "regions": slim["regions"]})


def _caption(slim: dict[str, Any], kind: str) -> str:
    """The official code's variants: short; extra; extended = short, extra; full = extended and every mask's words."""
    if kind in ("short", "extra"):
        return slim[kind]
    lines = [text for text in (slim["short"], slim["extra"]) if text.strip()]
    if kind == "full" and slim["masks"]:
        lines += [_ALSO_SEEN, *slim["masks"]]
    return "\n".join(lines)


SOURCE = Source(
    name="dci",
    summary="DCI, Densely Captioned Images: 7805 photographs with dense human captions",
    licence="captions CC BY-NC 4.0, photographs SA-1B licence",
    needs=NEEDS,
    read=read,
    takes_images=True,
    published={"test": 112},
    options={
        "goal_train": Option("", "GOAL's list of training pictures: its DCI_train or DCI_segment JSON", is_path=True),
        "goal_test": Option("", "GOAL's list of test pictures: its DCI_test.json", is_path=True),
        "caption": Option("extra", "which of the official captions", ("short", "extra", "extended", "full")),
    },
)
