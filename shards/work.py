"""A write that is under way: what it has closed is kept, and the next run of the same request goes on from there."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shards.contents import CONTENTS
from shards.location import Location
from shards.lock import FolderLock
from shards.mds import ClosedShard
from shards.receipt import Receipt, format_difference
from shards.report import Report
from shards.request import difference

Specs = dict[str, list[dict[str, Any]]]
"""By split, the entries of its closed shards in the index."""


class Work(ABC):
    """Where a set is written to, and what of it is there already.

    Args:
        where: The set's place, as users name it.
        home: Local folder of this work, held while it goes on.
        folder: In it, everything of the set that lies on this machine.
        disk: What is full when a disk is, as users name it.
    """

    def __init__(self, where: str, home: Path, folder: Path, disk: str) -> None:
        self.where = where
        self.disk = disk
        self.home = home
        self.folder = folder
        self.closed: Specs = {}
        self.begun = False

    @property
    def num_closed(self) -> int:
        """Pairs in closed shards."""
        return sum(spec["samples"] for specs in self.closed.values() for spec in specs)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the place; at the end, keep what the next run can go on from, and nothing else.

        Raises:
            ValueError: Another run is at it.
        """
        lock = FolderLock.take(self.home, self.where)
        try:
            yield
        finally:
            try:
                if self.begun and not self.closed:
                    self.drop()
            finally:  # what cannot be dropped now, by revoked credentials say, must not hold the place as well
                lock.release()

    def begin(self, asked: dict[str, Any]) -> str | None:
        """Take up what an earlier run of the same request left. Returns what to say about it.

        Raises:
            OSError: It cannot be read or written.
        """
        there, self.closed = self._load(asked)
        self.begun = True  # not before: what could not be taken up is not ours to drop
        if there is not None and there != asked:
            self.restart(asked)
            return f"an unfinished write of another request was at {self.where}: dropped"
        if self.closed:
            return f"going on: {self.num_closed:,} pairs were already written"
        self.restart(asked)
        return None

    def tidy(self, asked: dict[str, Any]) -> None:
        """Remove what is left of a write of this request, which has been published; that of another stays."""
        there, _ = self._load(asked)
        if there is None or there == asked:
            self.drop()

    def can_copy(self, place: Location) -> bool:
        """Whether a file elsewhere can be stored without its bytes coming by this machine."""
        return False

    def store(self, shard: ClosedShard, source: Location | None = None) -> None:
        """Put a shard and its contents where they will outlive this process, then note that it is there.

        Its bytes are those of the file `source`, where that is given: one on this machine, or one that can be copied.
        """
        lines = self.folder / shard.split / CONTENTS
        lines.parent.mkdir(parents=True, exist_ok=True)
        self._store(shard, source)
        with lines.open("ab") as file:
            file.write(shard.contents)
            file.flush()
            os.fsync(file.fileno())
        self._note(shard, lines.stat().st_size)
        self.closed.setdefault(shard.split, []).append(shard.spec)

    @abstractmethod
    def existing(self) -> Receipt | None:
        """The receipt of the set that is there; None where the place is free.

        Raises:
            ValueError: Something else is there.
        """

    @abstractmethod
    def is_left(self) -> bool:
        """Whether something of a write is lying about."""

    @abstractmethod
    def restart(self, asked: dict[str, Any]) -> None:
        """Forget what was written, and note what is being asked for."""

    @abstractmethod
    def publish(self) -> None:
        """Make the set appear, whole. Index, contents, notes and receipt lie in `folder`."""

    @abstractmethod
    def drop(self) -> None:
        """Remove everything of this write."""

    @abstractmethod
    def _load(self, asked: dict[str, Any]) -> tuple[dict[str, Any] | None, Specs]:
        """The request of an earlier run, and its closed shards where it was the same one; bring `folder` to that."""

    @abstractmethod
    def _store(self, shard: ClosedShard, source: Location | None) -> None: ...

    @abstractmethod
    def _note(self, shard: ClosedShard, contents_size: int) -> None: ...


def written_before(work: Work, asked: dict[str, Any], overwrite: bool, allow_missing: int) -> Report | None:
    """The report of a set that already answers the request; None where its place is free or may be replaced.

    Raises:
        ValueError: Something else is there, or the set lacks more pictures than are allowed.
    """
    receipt = work.existing()
    if receipt is None:
        return None
    old, name, request = receipt.content["name"], asked["name"], asked["request"]
    if (old, receipt.request) == (name, request):
        report = receipt.report(work.where)
        if report.missing > allow_missing:
            raise ValueError(
                f"{work.where} is there without {report.missing} pictures, which its missing.jsonl names; "
                f"{allow_missing} may be missing: get them and say overwrite, or --allow-missing {report.missing}"
            )
        return report
    if overwrite:
        return None
    changes = (difference(old, receipt.request, name, request), format_difference(receipt.request, request))
    raise ValueError(
        f"{work.where} holds {old} from another request ({'; '.join(filter(None, changes))}): "
        "choose another out, or say overwrite to replace it"
    )
