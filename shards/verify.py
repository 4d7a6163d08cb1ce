"""Re-read a set and name everything that is not as its receipt says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.contents import CONTENTS, Content, content_of, read_contents
from shards.ids import Ids
from shards.images import check_image
from shards.index import INDEX, Shard, hash_problem, read_index, size_problems
from shards.mirror import ORIGIN, drop_damaged, fetch, origin
from shards.reader import ShardReader
from shards.receipt import MANIFEST, fingerprint, read_receipt
from shards.report import Progress

_NOTES = (MANIFEST, ORIGIN, "rejected.jsonl", "missing.jsonl")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_set` found. `samples` counts the pairs that were read, `bytes` their pictures."""

    path: Path
    problems: list[str]
    samples: int
    bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.problems

    def lines(self) -> list[str]:
        """The report as lines of text for a terminal."""
        read = f"{self.samples} pairs, {self.bytes / 1e6:.1f} MB of pictures, {self.seconds:.1f} s"
        if self.ok:
            return [f"{self.path} is sound: {read}"]
        return [*self.problems, f"{self.path} has {len(self.problems)} problems ({read}): write it again"]


def quick_check(split_dir: Path) -> None:
    """Compare the size and hash of every shard of a split with its index. Training calls this before its first step.

    Of a set elsewhere the shards that are here already are compared; damaged ones are removed, to be fetched again.

    Raises:
        ValueError: The first shard that is missing, truncated or altered.
    """
    shards = read_index(split_dir)
    if origin(split_dir) is not None:
        drop_damaged(split_dir, (shard.spec for shard in shards))
        return
    for problem in _file_problems(split_dir, shards).values():
        raise ValueError(f"{problem}: write the set again, or copy it again from where it is whole")


def verify_set(path: Path, decode: bool = True, progress: Callable[[Progress], None] | None = None) -> VerifyReport:
    """Check files, hashes, ids, captions, pictures and counts of a set against its receipt.

    Args:
        path: The set's folder.
        decode: Whether every pixel is decoded; otherwise pictures are checked by their header.
        progress: Called after each pair.

    Raises:
        ValueError: The folder is no set at all: it has no receipt that can be read.
    """
    start = time.perf_counter()
    receipt = read_receipt(path)
    if receipt is None:
        raise ValueError(f"{path} holds no {MANIFEST}: it is no shard set, or one that was not written by shards")
    audit = _Audit(path, decode, progress, sum(entry["written"] for entry in receipt.splits.values()))
    for split, entry in receipt.splits.items():
        audit.split(split, entry)
    strangers = sorted({child.name for child in path.iterdir()} - set(receipt.splits) - set(_NOTES))
    audit.problems += [f"{path / name} is not in the receipt" for name in strangers]
    return VerifyReport(path, audit.problems, audit.samples, audit.bytes, time.perf_counter() - start)


class _Audit:
    """The state of one verification: what was seen, and what was wrong with it."""

    def __init__(self, path: Path, decode: bool, progress: Callable[[Progress], None] | None, wanted: int) -> None:
        self.path = path
        self.problems: list[str] = []
        self.samples = 0
        self.bytes = 0
        self._decode = decode
        self._progress = progress
        self._wanted = wanted
        self._ids = Ids()

    def split(self, split: str, entry: dict[str, Any]) -> None:
        """Check one split against its entry in the receipt."""
        folder = self.path / split
        try:
            if fingerprint(folder / INDEX) != entry["index"]:
                self.problems.append(f"{folder / INDEX} was altered after the set was written")
            shards = read_index(folder)
            contents = self._contents(folder, entry)
        except (OSError, ValueError) as error:
            self.problems.append(f"split {split}: {error}")
            return
        if origin(folder) is not None:
            drop_damaged(folder, (shard.spec for shard in shards))
            self.problems += _fetch_problems(folder, shards)
        damaged = _file_problems(folder, shards)
        self.problems += damaged.values()
        strangers = sorted({child.name for child in folder.iterdir()} - _names(folder, shards))
        self.problems += [f"{folder / name} is not in the index" for name in strangers]
        declared = sum(shard.samples for shard in shards)
        if declared != entry["written"]:
            self.problems.append(f"split {split}: {declared} pairs in the index, {entry['written']} in the receipt")
        # A damaged shard has been named; its samples would only repeat that.
        if not damaged:
            self._samples(folder, contents)

    def _contents(self, folder: Path, entry: dict[str, Any]) -> Iterator[Content] | None:
        """The list of contents; None for a set that was written before there were such lists."""
        if "contents" not in entry:
            return None
        if not (folder / CONTENTS).is_file():
            self.problems.append(f"{folder / CONTENTS} is missing")
        elif fingerprint(folder / CONTENTS) != entry["contents"]:
            self.problems.append(f"{folder / CONTENTS} was altered after the set was written")
        return read_contents(folder)

    def _samples(self, folder: Path, contents: Iterator[Content] | None) -> None:
        try:
            reader = ShardReader(folder)
        except ValueError as error:
            self.problems.append(str(error))
            return
        for index in range(len(reader)):
            listed, contents = self._next(contents)
            try:
                sample = reader[index]
                self.problems += [f"{folder}, pair {index}: {what}" for what in self._sample_problems(sample)]
                if contents is not None and content_of(sample["id"], sample["image"], sample["captions"]) != listed:
                    self.problems.append(f"{folder}, pair {index}: it is not what {CONTENTS} says")
                self.bytes += len(sample["image"])
            except ValueError as error:
                self.problems.append(str(error))
            self.samples += 1
            if self._progress is not None:
                self._progress(Progress(self.samples, self._wanted, self.bytes))

    def _next(self, contents: Iterator[Content] | None) -> tuple[Content | None, Iterator[Content] | None]:
        """The next pair of the list of contents, and what of the list can still be read."""
        try:
            return (None, None) if contents is None else (next(contents, None), contents)
        except ValueError as error:
            self.problems.append(str(error))
            return None, None

    def _sample_problems(self, sample: dict[str, Any]) -> Iterator[str]:
        id, captions = sample["id"], sample["captions"]
        if not self._ids.add(id):
            yield f"the id {id!r} occurs twice"
        if not captions or not all(isinstance(caption, str) and caption.strip() for caption in captions):
            yield f"{id!r} has an empty caption or none"
        try:
            check_image(sample["image"], "decode" if self._decode else "header")
        except ValueError as error:
            yield f"{id!r}: {error}"


def _names(folder: Path, shards: list[Shard]) -> set[str]:
    """What may lie in a split: in a mirror, unpacked shards too."""
    unpacked = {shard.spec["raw_data"]["basename"] for shard in shards if origin(folder) is not None}
    return {shard.name for shard in shards} | unpacked | {INDEX, CONTENTS}


def _fetch_problems(folder: Path, shards: list[Shard]) -> Iterator[str]:
    """Bring the shards of a mirror here; yield what is wrong with them where they lie."""
    for shard in shards:
        try:
            fetch(folder, shard.spec)
        except OSError as error:
            yield str(error)


def _file_problems(folder: Path, shards: list[Shard]) -> dict[str, str]:
    """By shard name: missing, of another size, or of another hash than the index declares."""
    problems = {shard.name: problem for shard, problem in size_problems(folder, shards)}
    for shard in shards:
        if shard.name not in problems:
            altered = hash_problem(folder, shard)
            if altered is not None:
                problems[shard.name] = altered
    return problems
