"""Reading a source as `write_set` does, without writing."""

from __future__ import annotations

from pathlib import Path

from shards.pair import Item, Missing, Pair, Rejected
from shards.request import make_request
from shards.sources import get_source


def read_items(
    name: str, source: Path | str | None = None, images: Path | str | None = None, **options: str
) -> list[Item]:
    """The items of a source; where it says how many there will be, it is right."""
    chosen = get_source(name)
    request = make_request(chosen, str(source) if source else None, str(images) if images else None, options)
    reading = chosen.read(request)
    items = list(reading)
    assert reading.wanted in (None, len(items))
    return items


def pairs(items: list[Item]) -> dict[str, Pair]:
    """The pairs by id."""
    return {item.id: item for item in items if isinstance(item, Pair)}


def reasons(items: list[Item]) -> dict[str, str]:
    """Why each rejected or missing item is no pair, by id."""
    return {item.id: item.reason for item in items if isinstance(item, Rejected | Missing)}
