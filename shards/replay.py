"""Going on after a stop: which pairs of a source lie in closed shards already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from shards.contents import CONTENTS


class SourceChangedError(Exception):
    """A source gives other pairs, or another order of them, than when the closed shards were written."""


class Replay:
    """Compares the pairs of a source, which come in the same order again, with the contents of the closed shards.

    Args:
        folder: Where the lists of contents lie, one in the folder of each split.
        counts: By split, how many pairs lie in closed shards: so many lines of its list count.
    """

    def __init__(self, folder: Path, counts: Mapping[str, int]) -> None:
        self._lines = {split: _lines(folder / split / CONTENTS, count) for split, count in counts.items()}
        self._next = {split: next(lines, None) for split, lines in self._lines.items()}

    def is_over(self, split: str) -> bool:
        """Whether every closed pair of a split has come by."""
        return self._next.get(split) is None

    def holds(self, split: str, line: str) -> bool:
        """Whether the pair with this line of contents is the next one of the closed shards; then pass on."""
        if self._next.get(split) != line:
            return False
        self._next[split] = next(self._lines[split], None)
        return True

    def check_over(self) -> None:
        """To be called when the source has ended.

        Raises:
            SourceChangedError: It has ended before the closed shards did.
        """
        if any(line is not None for line in self._next.values()):
            raise SourceChangedError


def _lines(path: Path, count: int) -> Iterator[str]:
    # Lines are only ever appended behind those that count.
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from islice(file, count)
