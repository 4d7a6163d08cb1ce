"""WebDataset tars and Parquet files, written by the libraries that people write them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset

from tests.shards.layouts import UNICODE_CAPTION
from tests.shards.real import caption, picture

HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""How the datasets library stores its Image feature."""


def write_samples(path: Path, samples: list[dict[str, Any]]) -> Path:
    """A tar by webdataset's own writer; values are bytes, or text (.txt) and objects (.json) that it encodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), compress=path.name.endswith("gz")) as tar:
        for sample in samples:
            tar.write(sample)
    return path


def img2dataset_samples(first: int = 0) -> list[dict[str, Any]]:
    """Three samples as img2dataset leaves them."""
    return [
        {
            "__key__": f"{number:09}",
            "jpg": picture(number),
            "txt": UNICODE_CAPTION if number == 1 else caption(number),
            "json": {"url": f"https://example.org/{number}", "caption": "of the json", "key": f"{number:09}"},
        }
        for number in range(first, first + 3)
    ]


def write_parquet(path: Path, columns: dict[str, Any], schema: pa.Schema | None = None, **options: Any) -> Path:
    """A Parquet file with small row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, schema=schema), path, **{"row_group_size": 2, **options})
    return path


def hf_file(path: Path, numbers: range, texts: list[Any] | None = None) -> Path:
    """A file as `Dataset.to_parquet` writes it: pictures with their names, one text or several a row."""
    images = [{"bytes": picture(number), "path": f"{number:05}.jpg"} for number in numbers]
    said = [caption(number) for number in numbers] if texts is None else texts
    kind = pa.list_(pa.string()) if any(isinstance(text, list) for text in said) else pa.string()
    schema = pa.schema([("image", HF_IMAGE), ("caption", kind), ("width", pa.int32())])
    return write_parquet(path, {"image": images, "caption": said, "width": [64] * len(images)}, schema)
