"""Exact search: the pictures of an index whose embeddings are nearest to that of a caption. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export.manifest import MANIFEST
from export.runtime import Bundle
from export.serving.index import EMBEDDINGS, ITEMS, THUMBNAILS, load_index
from pipeline.runs import sha256_of


@dataclass(frozen=True)
class Hit:
    """One result. rank: from 1. score: cosine, in [-1, 1]. caption: the picture's first. thumbnail: a JPEG."""

    rank: int
    score: float
    id: str
    caption: str
    thumbnail: bytes


class SearchIndex:
    """An index and the bundle that it was built with, ready for queries.

    Args:
        path: the index's folder.
        bundle_path: where the bundle is now, if it was moved away from the index.

    Raises:
        FileNotFoundError: the index or its bundle is not there.
        ValueError: either is damaged, or the bundle is not the one that embedded the pictures.
    """

    def __init__(self, path: str | Path, bundle_path: str | Path | None = None) -> None:
        self.path = Path(path)
        info = load_index(self.path)
        self.bundle = _own_bundle(self.path, info, bundle_path)
        try:
            self.embeddings = np.load(self.path / EMBEDDINGS, mmap_mode="r")
            self._items = (self.path / ITEMS).read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise ValueError(f"index {path} is damaged: {error}; build it again: pipeline index") from error
        if self.embeddings.shape != (info["count"], info["dim"]) or len(self._items) != info["count"]:
            raise ValueError(f"index {path} is damaged: its files disagree; build it again: pipeline index")

    def search(self, query: str, top: int = 5) -> list[Hit]:
        """The `top` nearest pictures, or all where there are fewer, the nearest first; equal scores in index order."""
        if not query.strip():
            raise ValueError("the query is empty; describe the picture you look for")
        if top < 1:
            raise ValueError(f"top is {top}; ask for at least one picture")
        scores = self.embeddings @ self.bundle.encode_texts([query])[0]  # [N]
        nearest = np.argsort(-scores, kind="stable")[:top]
        return [self._hit(rank, int(row), float(scores[row])) for rank, row in enumerate(nearest, start=1)]

    def _hit(self, rank: int, row: int, score: float) -> Hit:
        item = json.loads(self._items[row])
        offset, length = item["thumbnail"]
        with (self.path / THUMBNAILS).open("rb") as file:
            file.seek(offset)
            thumbnail = file.read(length)
        return Hit(rank, score, item["id"], item["captions"][0], thumbnail)


def search(index_path: str | Path, query_text: str, top: int = 5, bundle_path: str | Path | None = None) -> list[Hit]:
    """Open an index and ask it once; see `SearchIndex`."""
    return SearchIndex(index_path, bundle_path).search(query_text, top)


def _own_bundle(index_path: Path, info: dict[str, Any], bundle_path: str | Path | None) -> Bundle:
    recorded = info["bundle"]
    path = Path(bundle_path) if bundle_path is not None else (index_path.resolve() / recorded["path"]).resolve()
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(
            f"the bundle that embedded {index_path} is not at {path}; say where it is (--bundle), or build the index "
            "again: pipeline index"
        )
    if sha256_of(path / MANIFEST) != recorded["manifest_sha256"]:
        raise ValueError(
            f"{path} is not the bundle that embedded {index_path}, so their embeddings do not compare: build the "
            "index again: pipeline index"
        )
    return Bundle(path)
