"""Hugging Face style Parquet files: a column of pictures, one or more columns of captions.

    image       struct<bytes: binary, path: string>, as the datasets library writes pictures, or the bytes themselves
    caption     text, or a list of texts; several columns of captions may be stated
    train-00000-of-00004.parquet    the split is the file's, unless the options say otherwise

Files are read a few rows at a time, only the columns that are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shards.location import Location
from shards.names import path_id, stem
from shards.pair import Item, Pair, Rejected
from shards.sources.base import Option, Reading, Request, Source, source_files
from shards.sources.pairs import CAPTION_KEYS, SPLIT_KEY
from shards.sources.parquet_rows import count_rows, open_parquet, rows_in
from shards.sources.rows import captions_in, name_in
from shards.sources.splits import split_of, split_option

if TYPE_CHECKING:
    from pyarrow import DataType, Schema

NEEDS = (
    "SOURCE=Parquet: a file, a folder of them, or a pattern such as data/set/train-*.parquet, "
    "hf://datasets/OWNER/NAME/data/*.parquet or https://host/train-{00000..00003}-of-00004.parquet"
)
IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png", "image_bytes", "binary", "bytes")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are read. `id` and `split` are None where no column says so."""

    image: str
    captions: tuple[str, ...]
    id: str | None
    split: str | None

    @property
    def all(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(name for name in (self.image, *self.captions, self.id, self.split) if name))


def read(request: Request) -> Reading:
    """Stream the files, in the order of their names."""
    files = source_files(request, "parquet", NEEDS, ".parquet")
    return Reading.of([partial(_items, file, request.options) for file in files], count_rows(files))


def _items(place: Location, options: Mapping[str, str]) -> Iterator[Item]:
    with open_parquet(place) as file:
        columns = find_columns(file.schema_arrow, options, str(place))
        for number, row in enumerate(rows_in(file, columns.all), start=1):
            try:
                yield _pair(row, columns, place.name, number, options["split"])
            except ValueError as error:
                yield Rejected(f"{place.name}, row {number}", str(error))


def find_columns(schema: Schema, options: Mapping[str, str], name: str) -> Columns:
    """The stated columns, else the well-known ones, else the only one of its kind.

    Raises:
        ValueError: A column is not there or of another kind, or several could be meant; the message names them.
    """
    kinds = {field.name: field.type for field in schema}
    pictures = [column for column, kind in kinds.items() if _holds_pictures(kind)]
    texts = [column for column, kind in kinds.items() if _holds_texts(kind)]
    stated = tuple(column.strip() for column in options["caption_key"].split(",") if column.strip())
    for column in (*filter(None, (options["image_key"], options["id_key"], options["split_key"])), *stated):
        if column not in kinds:
            raise ValueError(f"{name} has no column {column!r}; it has {', '.join(kinds) or 'none'}")
    split = options["split_key"] or (SPLIT_KEY if SPLIT_KEY in texts else None)
    return Columns(
        image=_pick(options["image_key"], IMAGE_COLUMNS, pictures, f"{name}: pictures", "image_key"),
        captions=stated or (_pick("", CAPTION_KEYS, texts, f"{name}: captions", "caption_key"),),
        id=options["id_key"] or None,
        split=None if options["split"] else split,
    )


def _pick(stated: str, known: Sequence[str], fitting: Sequence[str], what: str, option: str) -> str:
    if stated and stated not in fitting:
        raise ValueError(f"{what} are not in column {stated!r}; columns of that kind: {', '.join(fitting) or 'none'}")
    found = stated or next((column for column in known if column in fitting), None)
    if found is None and len(fitting) == 1:
        return fitting[0]
    if found is None:
        raise ValueError(f"{what} may be in {' or '.join(fitting) or 'no column that is there'}: state {option}")
    return found


def _holds_pictures(kind: DataType) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return any(field.name == "bytes" and _holds_pictures(field.type) for field in fields)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _holds_texts(kind: DataType) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        return _holds_texts(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _pair(row: dict[str, Any], columns: Columns, file: str, number: int, split: str) -> Pair:
    image = row[columns.image]
    data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
    if not isinstance(data, bytes):
        where = f"; its file {path!r} is not in the Parquet file" if path else ""
        raise ValueError(f"{columns.image!r} holds no bytes{where}")
    captions = [caption for column in columns.captions for caption in captions_in(row, column)]
    if columns.id:
        id = name_in(row, columns.id)
    else:
        id = path_id(path) if path else f"{stem(file)}/{number}"
    own = row[columns.split] if columns.split else None
    written = split_of(split, file, id) if own in (None, "") else str(own)
    return Pair(id, data, captions, written, {"image": path} if path else {})


SOURCE = Source(
    name="parquet",
    summary="pairs in Parquet files as Hugging Face keeps them, local or elsewhere",
    licence="that of the files: as their publisher states",
    needs=NEEDS,
    read=read,
    options={
        "image_key": Option("", f"column of pictures; found by itself among {', '.join(IMAGE_COLUMNS)}"),
        "caption_key": Option(
            "", f"columns of captions, by commas (text or list); found by itself among {', '.join(CAPTION_KEYS)}"
        ),
        "id_key": Option("", "column of ids; without it, the picture's path, else file and row"),
        "split_key": Option("", f"column of split names; without it, {SPLIT_KEY!r} where there is one"),
        "split": split_option(),
    },
)
