"""DCI (Densely Captioned Images): 7805 SA-1B photographs with human descriptions of a hundred words and more.

Official layout, as a folder, as its parent, or as dci.tar.gz:

    densely_captioned_images/
      annotations/NNNNNN-data.json   one photograph each, joined on its field "image" ("sa_N.jpg")
      splits.json                    {"train": [...], "valid": [...], "test": [...]}: names of annotation files
      photos/                        empty as shipped; the photographs are SA-1B's sa_000138.tar
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from shards.pair import Entry, Rejected
from shards.sources.base import Option, Reading, Request, Source, find_source, join_images
from shards.store import Store, open_store

NEEDS = (
    "dci.tar.gz (github.com/facebookresearch/DCI), unpacked or not, as SOURCE, and SA-1B's sa_000138.tar, "
    "unpacked or not, as IMAGES unless photos/ holds its pictures"
)
UNLISTED = "unlisted"
"""Split of annotations that splits.json does not name: written, but never trained or tested on by accident."""

_SPLIT_NAMES = {"valid": "val"}
_ALSO_SEEN = "The following can also be seen in the image:"


def read(request: Request) -> Reading:
    """Read every annotation (short texts), then the photographs in one pass."""
    root = find_source(request, "dci", NEEDS)
    if root.is_dir() and (root / "densely_captioned_images").is_dir():
        root = root / "densely_captioned_images"
    photos = _photo_store(root, request.images)
    splits, annotations = _read_annotations(open_store(root))
    if not annotations:
        raise ValueError(f"{root} holds no annotations/*.json. dci needs: {NEEDS}")
    if splits is None:
        raise ValueError(f"{root} holds no splits.json beside annotations/. dci needs: {NEEDS}")
    absent = sorted(splits.keys() - annotations.keys())
    rejected = [Rejected(file, "in splits.json, but not in annotations/", splits[file]) for file in absent]
    entries: list[tuple[str, Entry]] = []
    for file, slim in sorted(annotations.items()):
        item = _entry(file, slim, splits.get(file, UNLISTED), request.options["caption"])
        if isinstance(item, Rejected):
            rejected.append(item)
        else:
            entries.append(item)
    return Reading(chain(rejected, join_images(photos, entries)), len(rejected) + len(entries))


def _photo_store(root: Path, images: Path | None) -> Store:
    if images is not None:
        return open_store(images)
    if not (root / "photos").is_dir():
        raise FileNotFoundError(f"the photographs of DCI are not in {root}. dci needs: {NEEDS}")
    return open_store(root / "photos")


def _read_annotations(store: Store) -> tuple[dict[str, str] | None, dict[str, dict[str, Any] | str]]:
    """The split of each annotation file (None without splits.json), and its slim content or the reason for none."""
    splits: dict[str, str] | None = None
    annotations: dict[str, dict[str, Any] | str] = {}
    for path, data in store.iter_files("annotations/*.json", "splits.json"):
        name = PurePosixPath(path).name
        if name == "splits.json":
            listed = json.loads(data)
            splits = {file: _SPLIT_NAMES.get(split, split) for split, files in listed.items() for file in files}
        else:
            try:
                annotations[name] = _slim(json.loads(data))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                annotations[name] = f"annotation cannot be read: {error!r}"
    return splits, annotations


def _slim(annotation: dict[str, Any]) -> dict[str, Any]:
    """Keep the words and boxes; nearly all of a file is base64 masks, and 7805 of those do not fit in memory."""
    masks = [mask for mask in annotation["mask_data"].values() if mask["mask_quality"] != 2]
    return {
        "image": annotation["image"],
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


def _entry(file: str, slim: dict[str, Any] | str, split: str, kind: str) -> tuple[str, Entry] | Rejected:
    if isinstance(slim, str):
        return Rejected(file, slim, split)
    id = PurePosixPath(slim["image"]).stem
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
    options={
        "caption": Option("extra", "which of the official captions", ("short", "extra", "extended", "full")),
    },
)
