"""DetailCaps-4870: pictures with three machine captions each, in the Parquet files of a Hugging Face data set.

data/*.parquet    columns binary (the picture's bytes, no struct), image (a path, not the picture), source, and
                  GT_Caption_GPT4O, GT_Caption_GPT4V, GT_Caption_Gemini15Pro, any of which may be empty
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.names import natural_key, path_id
from shards.pair import Item, Pair, Rejected
from shards.sources.base import Reading, Request, Source, find_source
from shards.sources.rows import captions_in, name_in, present

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

NEEDS = (
    "the .parquet files of huggingface.co/datasets/foundation-multimodal-models/DetailCaps-4870 in data/detailcaps, or "
    "as SOURCE: their folder or one of them"
)
CAPTIONS = ("GT_Caption_GPT4O", "GT_Caption_GPT4V", "GT_Caption_Gemini15Pro")
COLUMNS = ("image", "binary", *CAPTIONS)
_BATCH = 32
"""Rows, with their pictures, that are in memory at a time."""


def read(request: Request) -> Reading:
    """Stream the files row group by row group."""
    root = find_source(request, "detailcaps", NEEDS)
    paths = sorted(root.rglob("*.parquet"), key=lambda path: natural_key(str(path))) if root.is_dir() else [root]
    if not paths:
        raise ValueError(f"{root} holds no .parquet files. detailcaps needs: {NEEDS}")
    files = [_open(path) for path in paths]
    return Reading(_items(paths, files), sum(file.metadata.num_rows for file in files))


def _open(path: Path) -> ParquetFile:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(_damaged(path, error)) from error
    columns = file.schema_arrow.names
    absent = [column for column in COLUMNS if column not in columns]
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; it has {', '.join(columns)}. detailcaps needs: {NEEDS}")
    return file


def _items(paths: list[Path], files: list[ParquetFile]) -> Iterator[Item]:
    for path, file in zip(paths, files, strict=True):
        for number, row in enumerate(_rows(path, file), start=1):
            try:
                yield _pair(row)
            except ValueError as error:
                yield Rejected(f"{path.name}, row {number}", str(error), "test")


def _rows(path: Path, file: ParquetFile) -> Iterator[dict[str, Any]]:
    columns = [column for column in (*COLUMNS, "source") if column in file.schema_arrow.names]
    try:
        for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
            yield from batch.to_pylist()
    except OSError as error:  # pages that do not decompress or decode
        raise ValueError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged, incomplete or not Parquet ({error}); fetch it again"


def _pair(row: dict[str, Any]) -> Pair:
    image, data = name_in(row, "image"), row["binary"]
    if not isinstance(data, bytes):
        raise ValueError(f"'binary' of {image!r} holds {type(data).__name__}, not the bytes of a picture")
    captions = [captions_in(row, key)[0] for key in CAPTIONS]
    return Pair(path_id(image), data, captions, "test", {"image": image, **present(row, "source")})


SOURCE = Source(
    name="detailcaps",
    summary="DetailCaps-4870: 4870 pictures with three long machine captions each",
    licence="not stated with the data (the code is Apache-2.0); pictures from COCO, SA-1B, LAION and others",
    needs=NEEDS,
    read=read,
    published={"test": 4870},
)
