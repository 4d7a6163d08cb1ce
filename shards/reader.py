"""Random access to the pairs of a written set, without shared memory and without a process group."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from shards.index import INDEX, Shard, read_index, size_problems
from shards.mds import COLUMNS, SETS
from shards.mirror import ORIGIN, fetch, mirror, origin


def resolve_set(name_or_path: str, cache: Path | None = None) -> Path:
    """The folder of a set: a path, else `data/mds/<name>`; for a URL, the folder that mirrors it.

    Args:
        name_or_path: What a user says.
        cache: Where mirrors lie, `shards.mirror.cache_dir()` by default.

    Raises:
        ValueError: Neither is a folder, or no set is at the URL.
        OSError: The URL cannot be read.
    """
    if "://" in name_or_path:
        return mirror(name_or_path, cache)
    path = Path(name_or_path).expanduser()
    for place in (path, SETS / name_or_path):
        if place.is_dir():
            return place
    raise ValueError(
        f"no shard set {name_or_path!r}: neither {path} nor {SETS / name_or_path} is a folder; "
        f"write it with: make shards DATASET={path.name}"
    )


def set_for_streaming(name_or_path: str, cache: Path | None = None) -> Path:
    """The folder of a set for a reader that unpacks shards beside where they lie: for a compressed set, its mirror.

    Raises:
        ValueError, OSError: As `resolve_set`.
    """
    folder = resolve_set(name_or_path, cache)
    indexes = [] if (folder / ORIGIN).is_file() else folder.glob(f"*/{INDEX}")
    packed = any(shard.spec["compression"] is not None for index in indexes for shard in read_index(index.parent))
    return mirror(str(folder.resolve()), cache) if packed else folder


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
        self._is_mirror = origin(self.folder) is not None
        for _, problem in size_problems(self.folder, [] if self._is_mirror else self._shards):
            raise ValueError(f"{problem}: write the set again")
        self._ends = list(accumulate(shard.samples for shard in self._shards))
        self._readers: list[Any] | None = None
        self._unpacked: Any = None  # of compressed shards

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
            sample = self._open(shard)[position - first]
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder / self._shards[shard].name}: pair {index} is damaged ({error}); "
                f"see: pipeline shards verify {self.folder.parent}"
            ) from error
        return {column: sample[column] for column in COLUMNS}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": None, "_unpacked": None}

    def _open(self, number: int) -> Any:
        """streaming's reader of a shard, whose file is here then."""
        if self._readers is None:
            self._readers = [self._reader(shard) for shard in self._shards]
        if self._is_mirror:
            fetch(self.folder, self._shards[number].spec)
        return self._readers[number]

    def _reader(self, shard: Shard) -> Any:
        # Imported on first use: it brings torch along.
        from streaming.base.format import reader_from_json

        if shard.spec["compression"] is None:
            return reader_from_json(str(self.folder), "", shard.spec)
        from shards.packed import PackedReader, Unpacked

        self._unpacked = self._unpacked or Unpacked()
        return PackedReader.of(self.folder, shard.name, shard.spec, self._unpacked)


def _check_columns(folder: Path, shard: Shard) -> None:
    columns = dict(zip(shard.spec["column_names"], shard.spec["column_encodings"], strict=True))
    if columns != COLUMNS:
        raise ValueError(f"{folder / shard.name} holds the columns {columns}, not {COLUMNS}: write it with shards")
