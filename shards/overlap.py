"""What two splits share: ids, pictures, captions. Training on one and evaluating on the other then measures memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shards.contents import Content, content_of, read_contents
from shards.index import INDEX
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

    A set that was written before there were such lists is read whole instead.

    Raises:
        ValueError: A folder is no split, or cannot be read.
    """
    a, b = _contents(split_dir_a), _contents(split_dir_b)
    captions_of_a = {caption for pair in a for caption in pair.captions}
    return Overlap(
        a=split_dir_a,
        b=split_dir_b,
        size_a=len(a),
        size_b=len(b),
        ids=_shared(a, b, lambda pair: pair.id),
        pictures=_shared(a, b, lambda pair: pair.image),
        captions=tuple(pair.id for pair in b if not captions_of_a.isdisjoint(pair.captions)),
    )


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


def _contents(split_dir: Path) -> list[Content]:
    contents = read_contents(split_dir)
    if contents is None:
        reader = ShardReader(split_dir)
        pairs = (reader[index] for index in range(len(reader)))
        contents = [content_of(pair["id"], pair["image"], pair["captions"]) for pair in pairs]
    return contents


def _shared(a: Iterable[Content], b: Iterable[Content], key: Callable[[Content], Hashable]) -> tuple[str, ...]:
    known = {key(pair) for pair in a}
    return tuple(pair.id for pair in b if key(pair) in known)


def _name(split_dir: Path) -> str:
    return f"{split_dir.parent.name}/{split_dir.name}"


def _count(shared: tuple[str, ...], what: str) -> str:
    return f"{len(shared)} {what}{'' if len(shared) == 1 else 's'}"
