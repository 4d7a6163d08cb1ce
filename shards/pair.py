"""What a source yields: a pair, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """One picture and what is said about it.

    `image` holds the encoded bytes as they were found; nothing here ever re-encodes them. `captions` holds one text or
    more, byte for byte. `split` names the folder that the pair is written to. `meta` is anything that JSON can hold.
    """

    id: str
    image: bytes
    captions: list[str]
    split: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something that was wanted, was found, and cannot become a pair. `split` where it is known."""

    id: str
    reason: str
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """A caption whose picture is not where the pictures are."""

    id: str
    image_name: str
    reason: str = "not found"
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A pair whose picture has not been read yet: what a caption file says."""

    id: str
    captions: list[str]
    split: str
    meta: dict[str, Any] = field(default_factory=dict)

    def with_image(self, image: bytes) -> Pair:
        """The pair that this entry becomes once its picture's bytes are there."""
        return Pair(self.id, image, self.captions, self.split, self.meta)


Item = Pair | Rejected | Missing
