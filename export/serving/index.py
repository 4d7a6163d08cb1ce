"""A picture collection, embedded once with a bundle and kept on disk.

<index>/
    index.json        which bundle, which split, how many pictures of which dimension
    embeddings.npy    float32 [N, D], L2-normalised, in the split's order
    items.jsonl       line i describes picture i: id, captions, where its thumbnail lies
    thumbnails.bin    the thumbnails, JPEG, one behind the other
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from PIL import Image

from export.manifest import MANIFEST
from export.runtime import Bundle
from pipeline.runs import read_json, sha256_of, write_json
from shards.images import decode_rgb
from shards.reader import ShardReader
from shards.staging import clear_leftovers, staged

INDEX = "index.json"
EMBEDDINGS = "embeddings.npy"
ITEMS = "items.jsonl"
THUMBNAILS = "thumbnails.bin"
FORMAT = "hn-clip-index"
FORMAT_VERSION = 1
THUMBNAIL_SIZE = 384  # pixels, longer side: sharp at the width of a card of the result sheet


@dataclass(frozen=True)
class IndexReport:
    """What was built. path: the index. count: pictures. dim: of their embeddings."""

    path: Path
    count: int
    dim: int


def build_index(
    bundle_path: Path,
    split_dir: Path,
    out: Path,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> IndexReport:
    """Embed every picture of a split.

    Args:
        bundle_path: the bundle; its path relative to the index is written down, so both can move together.
        split_dir: a folder of MDS shards.
        out: the index's folder. An index that is there is replaced once the new one is complete.
        batch_size: pictures per run of the graph.
        progress: called with the number of pictures done.

    Raises:
        FileNotFoundError, ValueError: the bundle or the split is not usable, a picture does not decode, or `out` is
            something else than an index; nothing is left behind.
    """
    out = Path(out)
    if out.exists() and not _is_index(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an index, so it is not replaced; name another folder")
    bundle, reader = Bundle(bundle_path), ShardReader(split_dir)
    clear_leftovers(out)
    with staged(out, overwrite=True) as folder:
        _write_items(bundle, reader, folder, batch_size, progress)
        info = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "count": len(reader),
            "dim": bundle.embed_dim,
            "bundle": {
                "path": Path(os.path.relpath(bundle.path.resolve(), out.resolve())).as_posix(),
                "manifest_sha256": sha256_of(bundle.path / MANIFEST),
            },
        }
        write_json(folder / INDEX, info)
    return IndexReport(out, len(reader), bundle.embed_dim)


def load_index(path: Path) -> dict[str, Any]:
    """The contents of an index's `index.json`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not an index, or one of a format that this version does not read.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no index at {path}: no such folder; build one: pipeline index")
    if not _is_index(path):
        raise ValueError(f"{path} is not an index: it has no {INDEX} of ours; build one: pipeline index")
    info: dict[str, Any] = read_json(path / INDEX)
    if info["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} is an index of format {info['format_version']}, this version reads {FORMAT_VERSION}; "
            "build it again: pipeline index"
        )
    return info


def _is_index(path: Path) -> bool:
    if not (path / INDEX).is_file():
        return False
    info: Any = read_json(path / INDEX)
    return isinstance(info, dict) and info.get("format") == FORMAT


def _write_items(
    bundle: Bundle, reader: ShardReader, folder: Path, batch_size: int, progress: Callable[[int], None] | None
) -> None:
    shape = (len(reader), bundle.embed_dim)
    embeddings = np.lib.format.open_memmap(folder / EMBEDDINGS, mode="w+", dtype=np.float32, shape=shape)
    with (folder / ITEMS).open("w", encoding="utf-8") as items, (folder / THUMBNAILS).open("wb") as thumbnails:
        for start in range(0, len(reader), batch_size):
            samples = [reader[i] for i in range(start, min(start + batch_size, len(reader)))]
            embeddings[start : start + len(samples)] = _embed(bundle, samples)
            for sample in samples:
                _write_item(sample, items, thumbnails)
            if progress:
                progress(start + len(samples))
    embeddings.flush()


def _embed(bundle: Bundle, samples: Sequence[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        return bundle.encode_images([sample["image"] for sample in samples])
    except ValueError as error:
        ids = f"'{samples[0]['id']}' to '{samples[-1]['id']}'"
        raise ValueError(f"a picture among {ids}: {error}; see: pipeline shards verify") from error


def _write_item(sample: dict[str, Any], items: TextIO, thumbnails: BinaryIO) -> None:
    thumbnail = _thumbnail(sample["image"])
    entry = {
        "id": sample["id"],
        "captions": sample["captions"],
        "thumbnail": [thumbnails.tell(), len(thumbnail)],
    }
    thumbnails.write(thumbnail)
    items.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _thumbnail(data: bytes) -> bytes:
    """An encoded picture as a JPEG of at most `THUMBNAIL_SIZE` pixels a side."""
    image = decode_rgb(data)
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
