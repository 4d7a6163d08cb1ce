"""Compressed shards, read without unpacking them on disk."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from streaming.base.compression import decompress
from streaming.base.format.mds.reader import MDSReader


class Unpacked:
    """The bytes of the last few shards that were read: reading goes in order, or nearly."""

    def __init__(self, num_shards: int = 2) -> None:
        self._num_shards = num_shards
        self._shards: OrderedDict[Path, bytes] = OrderedDict()

    def get(self, path: Path, compression: str) -> bytes:
        """The unpacked bytes of a shard.

        Raises:
            ValueError: It cannot be unpacked.
        """
        if path not in self._shards:
            try:
                self._shards[path] = decompress(compression, path.read_bytes())
            except Exception as error:  # each of the five libraries has its own
                raise ValueError(f"{path} cannot be unpacked: {error}") from error
            while len(self._shards) > self._num_shards:
                self._shards.popitem(last=False)
        self._shards.move_to_end(path)
        return self._shards[path]


class PackedReader(MDSReader):
    """streaming's reader of a shard, over the unpacked bytes."""

    path: Path
    unpacked: Unpacked

    @classmethod
    def of(cls, folder: Path, file: str, spec: dict[str, Any], unpacked: Unpacked) -> PackedReader:
        """The reader of one shard by its entry in the index."""
        reader: PackedReader = cls.from_json(str(folder), "", spec)
        reader.path, reader.unpacked = folder / file, unpacked
        return reader

    def get_sample_data(self, idx: int) -> bytes:
        """The encoded sample at `idx`."""
        assert self.compression is not None
        data = self.unpacked.get(self.path, self.compression)
        begin, end = np.frombuffer(data, np.uint32, 2, offset=(1 + idx) * 4)
        return data[begin:end]
