"""A set in parts that any scheduler can write: which items of a source belong to part I of N.

Where a source consists of pieces, such as tars, and of as many as there are parts, each part is a run of them and reads
no other. Where a source says how many items there will be, each part is a run of those. Otherwise blocks of items are
dealt round, one to each part, and `shards.merge` puts them back in their order. In each case the merged set holds the
same pairs in the same order, whatever N is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shards.pair import Item
from shards.sources.base import Reading

BLOCK = 4096
"""Items of a block. Each has shards of its own, so it should fill some; it is the same for every N."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `of`, counted from 1.

    Raises:
        ValueError: There is no such part.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"there is no part {self.number} of {self.of}: parts are 1/N to N/N")

    @classmethod
    def parse(cls, text: str) -> Part:
        """`2/8` as a part."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise ValueError(f"a part is I/N, such as 2/8, not {text!r}")
        return cls(int(match.group(1)), int(match.group(2)))

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"

    def record(self) -> dict[str, int]:
        """The part as a receipt keeps it."""
        return asdict(self)

    def place(self, whole: str) -> str:
        """Where it is written when nobody says: never where the whole set belongs."""
        return f"{whole}.parts/{self.number}-of-{self.of}"


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """Stands behind the last item of a block."""


class Share:
    """The items of a part, each block followed by `BlockEnd`; without a part, all items and no blocks."""

    def __init__(self, reading: Reading, part: Part | None) -> None:
        self._reading = reading
        self._part = part
        self._blocks: list[dict[str, int]] = []
        self._before: Counter[str] = Counter()
        self._items = reading.wanted
        self.wanted = reading.wanted if part is None else None
        self._by_pieces = part is not None and len(reading.pieces) >= part.of
        count = len(reading.pieces) if self._by_pieces else reading.wanted
        if part is not None and count is not None:
            self._first, self._end = (count * number // part.of for number in (part.number - 1, part.number))
            self.wanted = None if self._by_pieces else self._end - self._first

    def __iter__(self) -> Iterator[Item | BlockEnd]:
        if self._part is None:
            yield from self._reading
        elif self._by_pieces:
            for piece in self._reading.pieces[self._first : self._end]:
                yield from piece()
            yield BlockEnd()
        elif self.wanted is not None:
            for number, item in enumerate(self._reading):
                if number >= self._end:
                    break
                if number >= self._first:
                    yield item
            yield BlockEnd()
        else:
            yield from self._dealt(self._part)

    def _dealt(self, part: Part) -> Iterator[Item | BlockEnd]:
        number = -1
        for number, item in enumerate(self._reading):
            if number // BLOCK % part.of == part.number - 1:
                yield item
                if number % BLOCK == BLOCK - 1:
                    yield BlockEnd()
        self._items = number + 1
        if self._items % BLOCK and number // BLOCK % part.of == part.number - 1:
            yield BlockEnd()

    def end_block(self, written: Counter[str]) -> None:
        """Note how many pairs of each split came of the block that has just ended."""
        self._blocks.append(dict(written - self._before))
        self._before = Counter(written)

    def record(self) -> dict[str, Any] | None:
        """For the receipt: the part, items (where known) and pieces of the source, pairs of each block by split."""
        if self._part is None:
            return None
        counts = {"items": self._items, "pieces": len(self._reading.pieces)}
        return {**self._part.record(), **counts, "blocks": self._blocks}
