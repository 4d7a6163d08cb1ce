"""The index of a split, read and compared with the shard files. streaming itself checks neither size nor hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.mds import hasher, stored

INDEX = "index.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as the index declares it: the file as it lies there, compressed or not.

    `spec` is the index's own object, for streaming's reader.
    """

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
    problem = facts_problem(stored(shard.spec), chunks_of(path))
    return f"{path} {problem}" if problem is not None else None


def facts_problem(facts: dict[str, Any], chunks: Iterable[bytes]) -> str | None:
    """What is wrong with the bytes of a file, by its size and hashes in the index."""
    hashers = {name: hasher(name) for name in facts["hashes"]}
    size = 0
    for chunk in chunks:
        size += len(chunk)
        for one in hashers.values():
            one.update(chunk)
    if size != facts["bytes"]:
        return f"has {size} bytes, not {facts['bytes']}"
    for name, one in hashers.items():
        if one.hexdigest() != facts["hashes"][name]:
            return f"is altered: its {name} is {one.hexdigest()}, not {facts['hashes'][name]}"
    return None


def chunks_of(path: Path) -> Iterator[bytes]:
    """The bytes of a file, some at a time."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _shard(spec: dict[str, Any]) -> Shard:
    file = stored(spec)
    shard = Shard(file["basename"], int(file["bytes"]), int(spec["samples"]), dict(file["hashes"]), spec)
    for name in shard.hashes:
        hasher(name)
    return shard
