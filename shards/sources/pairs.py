"""Any list of captions: JSONL, JSON, CSV or TSV, joined to a folder or an archive of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shards.location import Location
from shards.names import path_id, split_path
from shards.pair import Entry
from shards.sources.base import Option, Reading, Request, Source, announce, find_source, hash_split
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in
from shards.sources.table import read_rows
from shards.store import open_store

IMAGE_KEYS = (
    *("image_file", "file_name", "filename", "filepath", "file_path", "image_path", "image", "path"),
    *("original_filename", "image/key"),
)
CAPTION_KEYS = ("captions", "caption", "description", "text", "original_caption")
SPLIT_KEY = "split"

NEEDS = "SOURCE=captions.jsonl (or .json, .csv, .tsv) and, unless the pictures lie beside it, IMAGES=folder or archive"


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns that are read. `id` and `split` are None where there is no such column."""

    image: str
    caption: str
    id: str | None
    split: str | None


def read(request: Request) -> Reading:
    """Read the whole list (text only), group its rows by picture, then read the pictures in one pass."""
    if request.source is None:
        raise ValueError(f"pairs needs: {NEEDS}")
    source = find_source(request, "pairs", NEEDS)
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file. pairs needs: {NEEDS}")
    rows = list(read_rows(source))
    keys = find_keys([row for _, row in rows if isinstance(row, dict)], request.options, source)
    drafts = make_drafts(rows, lambda row: _draft(row, keys, request.options["split"]))
    announce("pairs", request.images)
    return joined(open_store(request.images or source.parent), drafts)


def find_keys(rows: list[dict[str, Any]], options: Mapping[str, str], source: Location) -> Keys:
    """The stated columns, else the well-known ones. Rows may differ in their columns: any row may show one.

    Raises:
        ValueError: A column is in no row; the message names those that are.
    """
    columns = dict.fromkeys(column for row in rows for column in row)

    def pick(option: str, known: tuple[str, ...], required: bool) -> str | None:
        stated = options[option]
        found = next((key for key in ((stated,) if stated else known) if key in columns), None)
        if found is None and (stated or required):
            wanted = f"column {stated!r}" if stated else f"column of {option.removesuffix('_key')}s"
            raise ValueError(
                f"{source} has no {wanted}; its columns are {', '.join(columns) or 'none'}: state {option}"
            )
        return found

    image, caption = pick("image_key", IMAGE_KEYS, True), pick("caption_key", CAPTION_KEYS, True)
    assert image is not None
    assert caption is not None
    return Keys(image, caption, pick("id_key", (), False), pick("split_key", (SPLIT_KEY,), False))


def _draft(row: dict[str, Any], keys: Keys, split: str) -> Draft:
    image = name_in(row, keys.image)
    if not split_path(image):
        raise ValueError(f"{keys.image!r} is {image!r}, not the path of a picture")
    id = _text(row, keys.id) or path_id(image)
    row_split = _text(row, keys.split) or (hash_split(id) if split == "hash" else split)
    return image, Entry(id, captions_in(row, keys.caption), row_split, {"image": image})


def _text(row: dict[str, Any], key: str | None) -> str:
    value = row.get(key) if key else None
    return "" if value is None else str(value).strip()


SOURCE = Source(
    name="pairs",
    summary="your own pictures with captions in a JSONL, JSON, CSV or TSV file",
    licence="that of your data",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options={
        "image_key": Option("", f"column of image paths; found by itself among {', '.join(IMAGE_KEYS)}"),
        "caption_key": Option(
            "", f"column of captions (text or list); found by itself among {', '.join(CAPTION_KEYS)}"
        ),
        "id_key": Option("", "column of ids; without it, the image path without its extension"),
        "split_key": Option("", f"column of split names; without it, {SPLIT_KEY!r} where there is one"),
        "split": Option("train", "split of rows without one: a name, or hash for 80/10/10 train/val/test by id"),
    },
)
