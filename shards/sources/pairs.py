"""Any list of captions: JSONL, JSON, CSV or TSV, joined to a folder or an archive of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from shards.names import split_path
from shards.pair import Entry, Rejected
from shards.sources.base import Option, Reading, Request, Source, hash_split, join_images
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
    if not request.source.is_file():
        raise FileNotFoundError(f"{request.source} is not a file. pairs needs: {NEEDS}")
    rows = list(read_rows(request.source))
    keys = find_keys([row for _, row in rows if isinstance(row, dict)], request.options, request.source)
    entries, rejected = group(rows, keys, request.options["split"])
    store = open_store(request.images or request.source.parent)
    return Reading(chain(rejected, join_images(store, entries)), len(rejected) + len(entries))


def find_keys(rows: list[dict[str, Any]], options: Mapping[str, str], source: Path) -> Keys:
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


def group(
    rows: list[tuple[int, dict[str, Any] | str]], keys: Keys, split: str
) -> tuple[list[tuple[str, Entry]], list[Rejected]]:
    """Make one entry per id out of numbered rows (a row that cannot be read is its reason); later rows add captions.

    Captions that are empty stay in, as "": the writer drops and counts them.
    """
    entries: dict[str, tuple[str, Entry]] = {}
    rejected = []
    for line, row in rows:
        try:
            image, entry = _entry(row, keys, split)
            known = entries.setdefault(entry.id, (image, entry))
            if known[1] is not entry:
                _merge(known, image, entry)
        except ValueError as error:
            rejected.append(Rejected(f"line {line}", str(error)))
    return list(entries.values()), rejected


def _entry(row: dict[str, Any] | str, keys: Keys, split: str) -> tuple[str, Entry]:
    if isinstance(row, str):
        raise ValueError(row)
    for key in (keys.image, keys.caption):
        if key not in row:
            raise ValueError(f"no {key!r}")
    image = row[keys.image]
    if not isinstance(image, str) or not split_path(image):
        raise ValueError(f"{keys.image!r} is {image!r}, not the path of a picture")
    id = _text(row, keys.id) or _default_id(image)
    row_split = _text(row, keys.split) or (hash_split(id) if split == "hash" else split)
    return image, Entry(id, _captions(row[keys.caption], keys.caption), row_split, {"image": image})


def _text(row: dict[str, Any], key: str | None) -> str:
    value = row.get(key) if key else None
    return "" if value is None else str(value).strip()


def _captions(value: Any, key: str) -> list[str]:
    captions = ["" if caption is None else caption for caption in (value if isinstance(value, list) else [value])]
    for caption in captions:
        if not isinstance(caption, str):
            raise ValueError(f"{key!r} holds {type(caption).__name__}, not text")
    return captions


def _default_id(image: str) -> str:
    """The picture's path without its extension and without what differs between machines."""
    *folders, name = split_path(image)
    stem = name.rpartition(".")[0] or name
    return "/".join([*folders, stem])


def _merge(known: tuple[str, Entry], image: str, entry: Entry) -> None:
    """Add the captions of another row of the same picture."""
    known_image, first = known
    if image != known_image:
        raise ValueError(f"id {entry.id!r} already stands for {known_image!r}, here for {image!r}")
    if entry.split != first.split:
        raise ValueError(f"{image!r} is in split {first.split!r} already, here in {entry.split!r}")
    first.captions.extend(entry.captions)


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
