"""The index of a split, read and compared with the shard files. streaming itself checks neither size nor hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

INDEX = "index.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as the index declares it. `spec` is the index's own object, for streaming's reader."""

    name: str
    bytes: int
    samples: int
    hashes: Mapping[str, str]
    spec: dict[str, Any]


def read_index(split_dir: Path) -> list[Shard]:
    """The shards of a split.

    Raises:
        ValueError: No index, or one that cannot be read.
    """
    path = split_dir / INDEX
    if not path.is_file():
        what = "holds no index.json" if split_dir.is_dir() else "does not exist"
        raise ValueError(f"{split_dir} {what}: it is no split of a shard set; write one with: pipeline shards write")
    try:
        specs = json.loads(path.read_text(encoding="utf-8"))["shards"]
        shards = [_shard(spec) for spec in specs]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): write the set again") from error
    if not shards:
        raise ValueError(f"{path} lists no shards: the split is empty")
    return shards


def size_problems(split_dir: Path, shards: list[Shard]) -> Iterator[tuple[Shard, str]]:
    """Yield the shards that are missing or have another size than declared, and say so."""
    for shard in shards:
        path = split_dir / shard.name
        if not path.is_file():
            yield shard, f"{path} is missing"
        elif path.stat().st_size != shard.bytes:
            yield shard, f"{path} has {path.stat().st_size} bytes, not {shard.bytes}"


def hash_problem(split_dir: Path, shard: Shard) -> str | None:
    """Compare a shard's bytes with every hash that the index declares."""
    path = split_dir / shard.name
    hashers = {name: _hasher(name) for name in shard.hashes}
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for hasher in hashers.values():
                hasher.update(chunk)
    for name, hasher in hashers.items():
        if hasher.hexdigest() != shard.hashes[name]:
            return f"{path} is altered: its {name} is {hasher.hexdigest()}, not {shard.hashes[name]}"
    return None


def _shard(spec: dict[str, Any]) -> Shard:
    raw = spec["raw_data"]
    shard = Shard(raw["basename"], int(raw["bytes"]), int(spec["samples"]), dict(raw["hashes"]), spec)
    for name in shard.hashes:
        _hasher(name)
    return shard


def _hasher(name: str) -> Any:
    """A hash object by the name that streaming uses."""
    return getattr(xxhash, name)() if name in xxhash.algorithms_available else hashlib.new(name)
