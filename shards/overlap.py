"""What two splits share: ids, pictures, captions. Training on one and evaluating on the other then measures memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shards.contents import CONTENTS, Content, content_of, read_contents
from shards.index import INDEX, chunks_of
from shards.reader import ShardReader, resolve_set

SHOWN = 5
"""How many shared pairs the lines of a report name."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What split `a` and split `b` share, by the ids of `b`'s pairs, in its order.

    Pictures are equal when their encoded bytes are: one that was resized or saved again is not seen, except by its id.
    Equal ids may stand for different pictures where both sets number theirs from 1.
    """

    a: Path
    b: Path
    size_a: int
    size_b: int
    ids: tuple[str, ...]
    pictures: tuple[str, ...]
    captions: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything is shared."""
        return bool(self.ids or self.pictures or self.captions)

    @property
    def pairs(self) -> tuple[str, ...]:
        """The ids of the pairs of `b` that `a` shares in any of the three respects."""
        return tuple(dict.fromkeys((*self.pictures, *self.captions, *self.ids)))

    def line(self) -> str:
        """The overlap in one line."""
        names = f"{_name(self.a)} ({self.size_a}) and {_name(self.b)} ({self.size_b})"
        if not self:
            return f"{names} share no id, picture or caption"
        counts = f"{_count(self.ids, 'id')}, {_count(self.pictures, 'picture')}, {_count(self.captions, 'caption')}"
        examples = ", ".join(self.pairs[:SHOWN]) + (", ..." if len(self.pairs) > SHOWN else "")
        return f"{names} share {counts}: {examples}"

    def warning(self) -> str | None:
        """What to say before training on `a` and evaluating on `b`; None where nothing is shared."""
        if not self:
            return None
        seen = len(dict.fromkeys((*self.pictures, *self.captions)))
        if seen:
            what = f"{seen} of {self.size_b} pairs of {_name(self.b)} were trained on: its figures are too good"
        else:
            what = "ids alone are shared: the same pictures saved again, or two sets that number theirs alike"
        return f"{self.line()}; {what}"


def overlap(split_dir_a: Path, split_dir_b: Path) -> Overlap:
    """Compare two splits by the lists of contents beside their shards: a second for a hundred thousand pairs.

    A set that was written before there were such lists is read whole instead. The smaller split is in memory, for the
    other may be a hundred million pairs to train on.

    Raises:
        ValueError: A folder is no split, or cannot be read.
    """
    size_a, size_b = _size(split_dir_a), _size(split_dir_b)
    smaller, larger = (split_dir_a, split_dir_b) if size_a < size_b else (split_dir_b, split_dir_a)
    both = _Hashes.of(_contents(smaller)).shared_with(_contents(larger))
    ids: list[str] = []
    pictures: list[str] = []
    captions: list[str] = []
    for pair in _contents(split_dir_b):
        ids += [pair.id] * (pair.id in both.ids)
        pictures += [pair.id] * (pair.image in both.pictures)
        captions += [pair.id] * (not both.captions.isdisjoint(pair.captions))
    return Overlap(split_dir_a, split_dir_b, size_a, size_b, tuple(ids), tuple(pictures), tuple(captions))


def overlaps(set_a: str, set_b: str) -> list[Overlap]:
    """Compare every split of one set with every split of another; each may also be a single split's folder.

    The same set twice: each of its splits with each other one, once.

    Raises:
        ValueError: One of them is neither a set nor a split.
    """
    found: dict[frozenset[Path], Overlap] = {}
    for a in _split_dirs(set_a):
        for b in _split_dirs(set_b):
            both = frozenset((a.resolve(), b.resolve()))
            if len(both) == 2 and both not in found:
                found[both] = overlap(a, b)
    return list(found.values())


def _split_dirs(name_or_path: str) -> list[Path]:
    folder = resolve_set(name_or_path)
    if (folder / INDEX).is_file():
        return [folder]
    splits = sorted(index.parent for index in folder.glob(f"*/{INDEX}"))
    if not splits:
        raise ValueError(f"{folder} holds no split: it is no set of shards, and no split of one")
    return splits


@dataclass(frozen=True, slots=True)
class _Hashes:
    """What pairs are known by."""

    ids: set[str]
    pictures: set[str]
    captions: set[str]

    @classmethod
    def of(cls, pairs: Iterable[Content]) -> _Hashes:
        found = cls(set(), set(), set())
        for pair in pairs:
            found.ids.add(pair.id)
            found.pictures.add(pair.image)
            found.captions.update(pair.captions)
        return found

    def shared_with(self, pairs: Iterable[Content]) -> _Hashes:
        found = _Hashes(set(), set(), set())
        for pair in pairs:
            found.ids.update(self.ids & {pair.id})
            found.pictures.update(self.pictures & {pair.image})
            found.captions.update(self.captions.intersection(pair.captions))
        return found


def _size(split_dir: Path) -> int:
    path = split_dir / CONTENTS
    return sum(chunk.count(b"\n") for chunk in chunks_of(path)) if path.is_file() else len(ShardReader(split_dir))


def _contents(split_dir: Path) -> Iterator[Content]:
    listed = read_contents(split_dir)
    if listed is not None:
        yield from listed
        return
    reader = ShardReader(split_dir)
    for pair in (reader[index] for index in range(len(reader))):
        yield content_of(pair["id"], pair["image"], pair["captions"])


def _name(split_dir: Path) -> str:
    return f"{split_dir.parent.name}/{split_dir.name}"


def _count(shared: tuple[str, ...], what: str) -> str:
    return f"{len(shared)} {what}{'' if len(shared) == 1 else 's'}"
