"""What each pair of a split is, as hashes: a list beside the shards, so that sets are compared without reading them.

    train/contents.jsonl    {"id": "sa_1545001", "image": "<xxh3_128>", "captions": ["<xxh3_64>", ...]}

one line a pair, in the order of the shards. The receipt holds the size and sha256 of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

CONTENTS = "contents.jsonl"


@dataclass(frozen=True, slots=True)
class Content:
    """A pair by its hashes: of the picture's encoded bytes, and of each caption's UTF-8."""

    id: str
    image: str
    captions: list[str]


def content_of(id: str, image: bytes, captions: Sequence[str]) -> Content:
    """The hashes of a pair."""
    hashed = [xxhash.xxh3_64_hexdigest(caption.encode()) for caption in captions]
    return Content(id, xxhash.xxh3_128_hexdigest(image), hashed)


def content_line(content: Content) -> str:
    """A content as a line of the list."""
    fields = {"id": content.id, "image": content.image, "captions": content.captions}  # asdict would take longer
    return json.dumps(fields, separators=(",", ":")) + "\n"


def read_contents(split_dir: Path) -> Iterator[Content] | None:
    """The contents of a split out of its list, one after the other, or None where it has none.

    Raises:
        ValueError: At the first line that cannot be read.
    """
    path = split_dir / CONTENTS
    return _lines(path) if path.is_file() else None


def _lines(path: Path) -> Iterator[Content]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield Content(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): write the set again") from error
