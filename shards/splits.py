"""The shards of all splits of a set while they fill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from shards.index import INDEX
from shards.mds import OpenShard, ShardFormat, encode_pair, index_bytes
from shards.pair import Pair
from shards.stopped import is_full
from shards.work import Work


class SplitWriters:
    """The open shard of each split, and the lists of what was left out.

    A full shard is laid out, hashed, compressed and stored by a thread, while the next one fills: two are in memory.
    """

    def __init__(self, work: Work, format: ShardFormat) -> None:
        self._work = work
        self._format = format
        self._open: dict[str, OpenShard] = {}
        self._count = {split: len(specs) for split, specs in work.closed.items()}
        self._notes: dict[str, IO[str]] = {}
        self._files = ExitStack()
        self._thread = ThreadPoolExecutor(1, "shards")
        self._last: Future[None] | None = None

    def write(self, pair: Pair, captions: list[str], line: str) -> None:
        """Append a pair to its split, with its line of the contents."""
        sample = encode_pair(pair, captions)
        shard = self._open.get(pair.split)
        if shard is not None and not shard.fits(sample):
            self._close(shard)
            shard = None
        if shard is None:
            shard = OpenShard(pair.split, self._count.get(pair.split, 0), self._format)
            self._open[pair.split] = shard
            self._count[pair.split] = shard.number + 1
        shard.add(sample, line)

    def cut(self) -> None:
        """Close the open shard of every split: what comes next goes to new ones."""
        for shard in self._open.values():
            self._close(shard)
        self._open = {}

    def note(self, file: str, line: dict[str, Any]) -> None:
        """Append a line to a JSONL file beside the splits."""
        if file not in self._notes:
            self._notes[file] = self._files.enter_context((self._work.folder / file).open("w", encoding="utf-8"))
        self._notes[file].write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Close the last shards and write the indexes."""
        self.cut()
        self._wait()
        for split, specs in self._work.closed.items():
            (self._work.folder / split / INDEX).write_bytes(index_bytes(specs))

    @contextmanager
    def open(self) -> Iterator[SplitWriters]:
        """Let go of files and thread at the end, whether or not the set was finished."""
        with self._files, self._thread:
            yield self

    def _close(self, shard: OpenShard) -> None:
        self._wait()
        self._last = self._thread.submit(self._store, shard)

    def _store(self, shard: OpenShard) -> None:
        closed = shard.close()
        try:
            self._work.store(closed)
        except OSError as error:
            if is_full(error):
                raise  # to be named as the disk that it is
            raise OSError(f"{self._work.where} cannot be written: {error.strerror or error}") from error

    def _wait(self) -> None:
        """For the shard before to be stored; its errors are raised here."""
        if self._last is not None:
            self._last.result()
            self._last = None
