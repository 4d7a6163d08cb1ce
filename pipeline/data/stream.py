"""Shards for streaming that come from elsewhere when they are needed."""

from __future__ import annotations

from pathlib import Path

from streaming import Stream

from shards.index import read_index
from shards.mirror import fetch


class MirrorStream(Stream):
    """A split in a folder, whose missing shards are fetched as `shards.mirror` does it.

    streaming's own downloads would keep a file whose hash is wrong, know fewer places than fsspec, and let two runs
    that share a cache refuse each other. To streaming this is a local split, of which it awaits some shards.
    """

    def __init__(self, split_dir: Path) -> None:
        super().__init__(local=str(split_dir), keep_zip=True)
        self._split_dir = split_dir
        self._specs = {shard.name: shard.spec for shard in read_index(split_dir)}

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        return str(fetch(self._split_dir, self._specs[from_basename]))
