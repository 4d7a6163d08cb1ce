"""Random access to the pairs of a written set, without shared memory and without a process group."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from shards.index import Shard, read_index, size_problems
from shards.mds import COLUMNS, SETS


def resolve_set(name_or_path: str) -> Path:
    """The folder of a set: a path, else `data/mds/<name>`.

    Raises:
        ValueError: Neither is a folder.
    """
    path = Path(name_or_path).expanduser()
    for place in (path, SETS / name_or_path):
        if place.is_dir():
            return place
    raise ValueError(
        f"no shard set {name_or_path!r}: neither {path} nor {SETS / name_or_path} is a folder; "
        f"write it with: make shards DATASET={path.name}"
    )


def split_dir(set_dir: Path, split: str) -> Path:
    """The folder of one split of a set.

    Raises:
        ValueError: The set has no such split; the message names those it has.
    """
    path = set_dir / split
    if split and (path / "index.json").is_file():
        return path
    there = sorted(index.parent.name for index in set_dir.glob("*/index.json"))
    raise ValueError(f"{set_dir} has no split {split!r}; it has {', '.join(there) or 'none'}")


class ShardReader:
    """The pairs of one split by position, in the order in which they were written.

    Safe to hand to DataLoader workers: pickling carries the folder and the index, never an open file.

    Args:
        folder: A split's folder, with its index.json.

    Raises:
        ValueError: The folder is no split, a shard is missing or truncated, or it holds other columns than ours.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._shards = read_index(self.folder)
        for shard in self._shards:
            _check_columns(self.folder, shard)
        for _, problem in size_problems(self.folder, self._shards):
            raise ValueError(f"{problem}: write the set again")
        self._ends = list(accumulate(shard.samples for shard in self._shards))
        self._readers: list[Any] | None = None

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The pair at `index`: id (str), image (bytes), captions (list of str), meta (dict).

        Raises:
            IndexError: `index` is outside the split.
            ValueError: The sample's bytes are damaged.
        """
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{index} is outside a split of {len(self)} pairs")
        shard = bisect_right(self._ends, position)
        first = self._ends[shard] - self._shards[shard].samples
        try:
            sample = self._open()[shard][position - first]
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder / self._shards[shard].name}: pair {index} is damaged ({error}); "
                f"see: pipeline shards verify {self.folder.parent}"
            ) from error
        return {column: sample[column] for column in COLUMNS}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": None}

    def _open(self) -> list[Any]:
        if self._readers is None:
            # Imported on first use: it brings torch along.
            from streaming.base.format import reader_from_json

            self._readers = [reader_from_json(str(self.folder), "", shard.spec) for shard in self._shards]
        return self._readers


def _check_columns(folder: Path, shard: Shard) -> None:
    columns = dict(zip(shard.spec["column_names"], shard.spec["column_encodings"], strict=True))
    if columns != COLUMNS:
        raise ValueError(f"{folder / shard.name} holds the columns {columns}, not {COLUMNS}: write it with shards")
