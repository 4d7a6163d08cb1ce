"""DetailCaps-4870: pictures with three machine captions each, in the Parquet files of a Hugging Face data set.

data/*.parquet    columns binary (the picture's bytes, no struct), image (a path, not the picture), source, and
                  GT_Caption_GPT4O, GT_Caption_GPT4V, GT_Caption_Gemini15Pro, any of which may be empty
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shards.location import Location
from shards.names import path_id
from shards.pair import Item, Pair, Rejected
from shards.sources.base import Reading, Request, Source, source_files
from shards.sources.parquet_rows import count_rows, open_parquet, rows_in
from shards.sources.rows import captions_in, name_in, present

HOME = "hf://datasets/foundation-multimodal-models/DetailCaps-4870"

NEEDS = (
    f"a connection, to stream from {HOME} when neither SOURCE nor data/detailcaps is there; or its .parquet files in "
    "data/detailcaps, or as SOURCE: their folder, one of them, or a pattern"
)
CAPTIONS = ("GT_Caption_GPT4O", "GT_Caption_GPT4V", "GT_Caption_Gemini15Pro")
COLUMNS = ("image", "binary", *CAPTIONS)


def read(request: Request) -> Reading:
    """Stream the files row group by row group."""
    files = source_files(request, "detailcaps", NEEDS, ".parquet")
    return Reading(_items(files), count_rows(files))


def _items(files: list[Location]) -> Iterator[Item]:
    for place in files:
        with open_parquet(place) as file:
            columns = file.schema_arrow.names
            absent = [column for column in COLUMNS if column not in columns]
            if absent:
                raise ValueError(
                    f"{place} has no {', '.join(absent)}; it has {', '.join(columns)}. detailcaps needs: {NEEDS}"
                )
            wanted = [column for column in (*COLUMNS, "source") if column in columns]
            for number, row in enumerate(rows_in(file, wanted), start=1):
                try:
                    yield _pair(row)
                except ValueError as error:
                    yield Rejected(f"{place.name}, row {number}", str(error), "test")


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
    home=HOME,
    published={"test": 4870},
)
