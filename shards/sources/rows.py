"""From the rows of a caption list to entries that wait for their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from shards.pair import Entry, Rejected
from shards.sources.base import Reading, join_images
from shards.sources.table import Row
from shards.store import Store

Draft = tuple[str, Entry]
"""The path of a picture as the list gives it, and what is said about the picture."""


def make_drafts(
    rows: Iterable[tuple[int, Row]], make: Callable[[dict[str, Any]], Draft | None], where: str = "line"
) -> list[Draft | Rejected]:
    """Make a draft of each numbered row; rows with the id of an earlier one add their captions to it.

    Args:
        rows: Numbered rows; one that cannot be read is its reason.
        make: Gives None for a row that is not asked for, and raises ValueError for one that cannot become a pair.
        where: What the number counts, in the id of a rejected row: "line 7".
    """
    drafts: dict[str, Draft] = {}
    rejected = []
    for number, row in rows:
        try:
            if isinstance(row, str):
                raise ValueError(row)
            draft = make(row)
            if draft is not None:
                known = drafts.setdefault(draft[1].id, draft)
                if known is not draft:
                    _merge(known, draft)
        except ValueError as error:
            rejected.append(Rejected(f"{where} {number}", str(error)))
        except (KeyError, TypeError, AttributeError, IndexError) as error:  # it is built otherwise than the others
            rejected.append(Rejected(f"{where} {number}", f"cannot be read: {error!r}"))
    return [*rejected, *drafts.values()]


def joined(store: Store, drafts: Sequence[Draft | Rejected]) -> Reading:
    """Read the picture of each draft, in one pass over the store."""
    rejected = [draft for draft in drafts if isinstance(draft, Rejected)]
    entries = [draft for draft in drafts if not isinstance(draft, Rejected)]
    return Reading(chain(rejected, join_images(store, entries)), len(drafts))


def name_in(row: dict[str, Any], key: str) -> str:
    """A name, path or number that a row has to have.

    Raises:
        ValueError: It is not there, empty, or neither text nor a number.
    """
    value = _value(row, key)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{key!r} is {value!r}, not a name")
    return str(value)


def split_in(row: dict[str, Any], splits: Sequence[str]) -> str:
    """The split of a row.

    Raises:
        ValueError: It is none of the data set's own.
    """
    split = name_in(row, "split")
    if split not in splits:
        raise ValueError(f"'split' is {split!r}, not one of {', '.join(splits)}")
    return split


def captions_in(row: dict[str, Any], key: str) -> list[str]:
    """The text or texts of a row. None stands for an empty one, which the writer drops and counts.

    Raises:
        ValueError: There is no such key, or what it holds is not text.
    """
    value = _value(row, key)
    captions = ["" if caption is None else caption for caption in (value if isinstance(value, list) else [value])]
    for caption in captions:
        if not isinstance(caption, str):
            raise ValueError(f"{key!r} holds {type(caption).__name__}, not text")
    return captions


def present(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Those of the keys that a row has."""
    return {key: row[key] for key in keys if key in row}


def _value(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise ValueError(f"no {key!r} among {', '.join(row) or 'no keys at all'}")
    return row[key]


def _merge(known: Draft, draft: Draft) -> None:
    """Add the captions of another row of the same picture."""
    (known_image, first), (image, entry) = known, draft
    if image != known_image:
        raise ValueError(f"id {entry.id!r} already stands for {known_image!r}, here for {image!r}")
    if entry.split != first.split:
        raise ValueError(f"{image!r} is in split {first.split!r} already, here in {entry.split!r}")
    first.captions.extend(entry.captions)
