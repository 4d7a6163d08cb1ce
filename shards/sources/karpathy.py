"""Karpathy's lists of COCO and Flickr30k: {"images": [{"filename", "split", "sentences": [{"raw"}, ...]}, ...]}."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shards.sources.rows import captions_in
from shards.sources.table import Row, parse_json, rows_of

NEEDS = "Karpathy's list (cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip, free)"


def karpathy_rows(name: str, data: bytes) -> Iterator[tuple[int, Row]]:
    """The pictures of a list, numbered from 1."""
    return rows_of(parse_json(data, name, "images")["images"], name)


def sentences(image: dict[str, Any]) -> list[str]:
    """The captions of a picture.

    Raises:
        ValueError: There are none, or they are not as the list has them.
    """
    listed = image.get("sentences")
    if not isinstance(listed, list) or not all(isinstance(sentence, dict) for sentence in listed):
        raise ValueError(f"'sentences' is {listed!r}, not a list of sentences")
    return [caption for sentence in listed for caption in captions_in(sentence, "raw")]
