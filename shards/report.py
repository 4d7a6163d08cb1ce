"""What a write counts while it runs, and what it says at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shards.pair import Missing, Rejected

SHOWN = 5
"""How many rejected and missing items a report names; the files beside the manifest name all."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a write or a verification is: items done of `wanted` (None where unknown), and bytes of pictures."""

    done: int
    wanted: int | None
    bytes: int


@dataclass(slots=True)
class Tally:
    """Counts of one write. The per-split counters leave out items whose split is not known."""

    written: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    num_rejected: int = 0
    num_missing: int = 0
    empty_captions: int = 0
    bytes: int = 0
    first_rejected: list[Rejected] = field(default_factory=list)
    first_missing: list[Missing] = field(default_factory=list)

    @property
    def num_written(self) -> int:
        """Pairs written to any split."""
        return self.written.total()

    @property
    def done(self) -> int:
        """Items seen: written, rejected and missing."""
        return self.num_written + self.num_rejected + self.num_missing

    def reject(self, item: Rejected) -> None:
        """Count a rejected item."""
        self.num_rejected += 1
        self.rejected.update([item.split] if item.split else [])
        if len(self.first_rejected) < SHOWN:
            self.first_rejected.append(item)

    def miss(self, item: Missing) -> None:
        """Count an item whose picture is not there."""
        self.num_missing += 1
        self.missing.update([item.split] if item.split else [])
        if len(self.first_missing) < SHOWN:
            self.first_missing.append(item)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of `write_set`. With `already_there` nothing was written: the counts are the receipt's.

    `went_on_after` counts the pairs that an earlier run had written.
    """

    name: str
    out: str
    wanted: int
    written: dict[str, int]
    rejected: int
    missing: int
    empty_captions: int
    bytes: int
    seconds: float
    first_rejected: list[Rejected] = field(default_factory=list)
    first_missing: list[Missing] = field(default_factory=list)
    already_there: bool = False
    went_on_after: int = 0

    def lines(self) -> list[str]:
        """The report as lines of text for a terminal: counts, what was left out, where the set is, and what is next."""
        total = sum(self.written.values())
        splits = ", ".join(f"{split} {count}" for split, count in sorted(self.written.items()))
        lines = [
            f"wanted {self.wanted}, written {total}, rejected {self.rejected}, missing {self.missing}",
            f"{self.out}: {splits}; {self.bytes / 1e6:.1f} MB of pictures",
        ]
        if self.already_there:
            lines.insert(0, "already there, nothing to do")
        else:
            lines[1] += f", {self.seconds:.1f} s"
        if self.went_on_after:
            lines.append(f"{self.went_on_after:,} of them were written by a run before this one")
        if self.empty_captions:
            lines.append(f"{self.empty_captions} empty captions left out")
        lines += [f"rejected {item.id}: {item.reason}" for item in self.first_rejected]
        lines += [f"missing {item.id}: {item.image_name}" for item in self.first_missing]
        if self.rejected > len(self.first_rejected):
            lines.append(f"all rejected: {self.out}/rejected.jsonl")
        if self.missing > len(self.first_missing):
            lines.append(f"all missing: {self.out}/missing.jsonl")
        return [*lines, f"next: pipeline shards verify {self.out}"]


def too_many_missing(name: str, tally: Tally, allowed: int) -> str:
    """What to say where more pictures are missing than may be."""
    named = ", ".join(f"{item.id} ({item.image_name})" for item in tally.first_missing)
    more = tally.num_missing - len(tally.first_missing)
    return (
        f"{name}: {tally.num_missing} pictures are missing, {allowed} may be: {named}"
        f"{f' and {more} more' if more else ''}. Get them, or write the set without them (its missing.jsonl will name "
        f"all of them): --allow-missing {tally.num_missing}"
    )


def nothing_written(name: str, tally: Tally) -> str:
    """What to say where not one pair came of a source."""
    if tally.first_missing:
        wanted = ", ".join(repr(item.image_name) for item in tally.first_missing[:3])
        return (
            f"{name}: not one of {tally.num_missing} wanted pictures was found. Wanted, for example: {wanted}. "
            f"The first is {tally.first_missing[0].reason}. Point IMAGES (or SOURCE) at the folder or archive with them"
        )
    if tally.first_rejected:
        first = tally.first_rejected[0]
        return f"{name}: all {tally.num_rejected} items were rejected, the first, {first.id}, because: {first.reason}"
    return f"{name}: the source is empty, there is nothing to write"
