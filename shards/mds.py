"""The MDS format: a pair as bytes, and the shard that is being filled. Byte for byte what streaming's MDSWriter writes.

It is written here because a write has to know when a shard is closed, to go on after it and to send it away, and
because MDSWriter copies every picture three times.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from shards.pair import Pair

SETS = Path("data/mds")
"""Where a set goes, and is looked for, when only its name is given."""

COLUMNS = {"id": "str", "image": "bytes", "captions": "json", "meta": "json"}

HASHES = ("xxh64",)
"""Kept in the index of each split; `shards.verify` and the start of a training run compare them."""

SHARD_SIZE = 1 << 26

_SMALL = 1 << 14
"""Bytes; smaller samples are joined, up to `_JOINED`: so many Python objects would cost more than the copies."""

_JOINED = 1 << 20

_DIGITS = 5

_LARGEST = 1 << 32
"""Offsets in a shard are 32 bits wide."""


@dataclass(frozen=True)
class ShardFormat:
    """How shards are written.

    Args:
        compression: One of streaming's algorithms, such as `zstd` or `zstd:7`, or None. Most pictures are compressed
            already: it pays for long captions and for bitmaps.
        hashes: Names of hashes that the index keeps of each shard, in sorted order; may be empty.
        size_limit: Bytes, from which on a shard is closed.

    Raises:
        ValueError: An algorithm that does not exist, or a size beyond the format's limit of 4 GiB.
    """

    compression: str | None = None
    hashes: tuple[str, ...] = HASHES
    size_limit: int = SHARD_SIZE

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashes", tuple(sorted(set(self.hashes))))
        for name in self.hashes:
            hasher(name)
        if not 0 < self.size_limit < _LARGEST:
            raise ValueError(f"a shard of {self.size_limit} bytes is not possible: above 0 and below 4 GiB")
        if self.compression is not None:
            from streaming.base.compression import get_compressions, is_compression  # brings torch along

            if not is_compression(self.compression):
                known = ", ".join(sorted(name for name in get_compressions() if ":" not in name))
                raise ValueError(
                    f"no compression {self.compression!r}: none, or one of {known}, perhaps with a level (zstd:7)"
                )

    def record(self) -> dict[str, Any]:
        """The format as a receipt keeps it."""
        return {"compression": self.compression, "hashes": list(self.hashes), "size_limit": self.size_limit}

    @cached_property
    def config(self) -> dict[str, Any]:
        """What each shard, and its entry in the index, says about itself."""
        names = sorted(COLUMNS)
        return {
            "version": 2,
            "format": "mds",
            **self.record(),
            "column_names": names,
            "column_encodings": [COLUMNS[name] for name in names],
            "column_sizes": [None] * len(names),
        }

    @cached_property
    def header(self) -> bytes:
        """The configuration as the bytes that stand in each shard."""
        return json.dumps(self.config, sort_keys=True).encode()


def encode_pair(pair: Pair, captions: list[str]) -> list[bytes]:
    """A sample as pieces, to be written one after the other; the picture is not copied."""
    texts, id, meta = json.dumps(captions).encode(), pair.id.encode(), json.dumps(pair.meta).encode()
    # The columns in the order of their names: captions, id, image, meta.
    return [struct.pack("<4I", len(texts), len(id), len(pair.image), len(meta)) + texts + id, pair.image, meta]


@dataclass(frozen=True, slots=True)
class ClosedShard:
    """A shard that is full: its entry in the index, the bytes of its file in pieces, its lines of the contents."""

    split: str
    spec: dict[str, Any]
    chunks: list[bytes | bytearray]
    contents: bytes

    @property
    def file(self) -> str:
        """The name of its file."""
        return str(stored(self.spec)["basename"])


def shard_name(number: int, kind: str) -> str:
    """The name of the file of a shard. Beyond 99999 there are more digits: names in their order are no text in its."""
    return f"shard.{number:0{_DIGITS}}.{kind}"


def stored(spec: dict[str, Any]) -> dict[str, Any]:
    """The name, size and hashes of a shard's file: of the compressed one, where shards are."""
    found: dict[str, Any] = spec["zip_data"] or spec["raw_data"]
    return found


@dataclass(slots=True)
class OpenShard:
    """The shard of a split that is being filled."""

    split: str
    number: int
    format: ShardFormat
    sizes: array[int] = field(default_factory=lambda: array("I"))
    pieces: list[bytes | bytearray] = field(default_factory=list)
    lines: bytearray = field(default_factory=bytearray)
    size: int = 0

    def fits(self, sample: list[bytes]) -> bool:
        """Whether a sample may be added. A sample above the limit has a shard of its own."""
        head = 8 + len(self.format.header)
        return not self.sizes or head + self.size + 4 + sum(map(len, sample)) <= self.format.size_limit

    def add(self, sample: list[bytes], line: str) -> None:
        """Add a sample and its line of the contents."""
        size = sum(map(len, sample))
        self.sizes.append(size)
        self.size += size + 4
        if size > _SMALL:
            self.pieces += sample
        else:
            if not self.pieces or not isinstance(self.pieces[-1], bytearray) or len(self.pieces[-1]) > _JOINED:
                self.pieces.append(bytearray())
            self.pieces[-1] += b"".join(sample)
        self.lines += line.encode()

    def close(self) -> ClosedShard:
        """Lay out, compress and hash the shard."""
        offset = 4 * (len(self.sizes) + 2) + len(self.format.header)
        offsets = [offset]
        for size in self.sizes:
            offsets.append(offset := offset + size)
        head = struct.pack(f"<{len(offsets) + 1}I", len(self.sizes), *offsets) + self.format.header
        chunks: list[bytes | bytearray] = [head, *self.pieces]
        name = shard_name(self.number, "mds")
        spec = {"samples": len(self.sizes), "raw_data": self._facts(name, chunks), "zip_data": None}
        if self.format.compression is not None:
            from streaming.base.compression import compress, get_compression_extension

            chunks = [compress(self.format.compression, b"".join(chunks))]
            name += f".{get_compression_extension(self.format.compression)}"
            spec["zip_data"] = self._facts(name, chunks)
        return ClosedShard(self.split, spec | self.format.config, chunks, bytes(self.lines))

    def _facts(self, name: str, chunks: Iterable[bytes | bytearray]) -> dict[str, Any]:
        hashers = {algorithm: hasher(algorithm) for algorithm in self.format.hashes}
        size = 0
        for chunk in chunks:
            size += len(chunk)
            for one in hashers.values():
                one.update(chunk)
        return {"basename": name, "bytes": size, "hashes": {name: one.hexdigest() for name, one in hashers.items()}}


def index_bytes(specs: list[dict[str, Any]]) -> bytes:
    """The index.json of a split."""
    return json.dumps({"version": 2, "shards": specs}, sort_keys=True).encode()


def hasher(name: str) -> Any:
    """A hash object by the name that streaming uses.

    Raises:
        ValueError: There is no such hash.
    """
    if name in xxhash.algorithms_available:
        return getattr(xxhash, name)()
    if name in hashlib.algorithms_available and hasattr(hashlib, name) and not name.startswith("shake_"):
        return getattr(hashlib, name)()
    known = sorted({*xxhash.algorithms_available, "md5", "sha1", "sha256", "blake2b"})
    raise ValueError(f"no hash {name!r}; there are {', '.join(known)}, and the others of Python's hashlib")
