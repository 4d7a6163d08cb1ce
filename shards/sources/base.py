"""What every source declares, and the few things that sources share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shards.names import NotFound
from shards.pair import Entry, Item, Missing
from shards.store import Store


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of one source.

    `choices` is empty where any text will do; with `several` the value is some of them, separated by commas. `is_path`
    says that the value is a file, so that a receipt notices when it is edited.
    """

    default: str
    help: str
    choices: tuple[str, ...] = ()
    several: bool = False
    is_path: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked a source for. `options` holds a value for every option that the source declares."""

    source: Path | None
    images: Path | None
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """A source being read: its items in a stable order, and how many there will be where that is known beforehand."""

    items: Iterator[Item]
    wanted: int | None = None

    def __iter__(self) -> Iterator[Item]:
        return self.items


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set, or one family of files, that pairs can be read from.

    `licence` is the data's own; `needs` says in one line what to install or download and where to point SOURCE. `read`
    raises ValueError or FileNotFoundError, with that line, when something is not there. `packages` are Python packages
    whose versions decide the data. `published` is the size of each split as its authors state it, where they do.
    """

    name: str
    summary: str
    licence: str
    needs: str
    read: Callable[[Request], Reading]
    takes_source: bool = True
    takes_images: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    published: Mapping[str, int] = field(default_factory=dict)


UNLISTED = "unlisted"
"""Split of what the official lists of splits do not name: written, but never trained or tested on by accident."""


def splits_option(*splits: str, default: str = "") -> Option:
    """The option `splits`: which of the data set's own splits are written, all by default."""
    return Option(default or ",".join(splits), "which splits, separated by commas", splits, several=True)


def wanted_splits(request: Request) -> tuple[str, ...]:
    """What `splits_option` was answered with."""
    return tuple(request.options["splits"].split(","))


def find_source(request: Request, name: str, needs: str) -> Path:
    """The stated SOURCE, else `data/<name>`, else `$DATA_DIR/<name>`.

    Raises:
        FileNotFoundError: It is not there; the message carries `needs`.
    """
    places = [request.source] if request.source else default_places(name)
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f"{' and '.join(map(str, places))} not found. {name} needs: {needs}")


def default_places(name: str) -> list[Path]:
    """Where a data set is looked for when no SOURCE is stated."""
    data_dir = os.environ.get("DATA_DIR")
    return [Path("data") / name] + ([Path(data_dir).expanduser() / name] if data_dir else [])


def hash_split(id: str) -> str:
    """`train`, `val` or `test`, 80/10/10, by the id alone: the same everywhere and whatever else is in the set."""
    bucket = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") % 10
    return ("val", "test")[bucket - 8] if bucket >= 8 else "train"


def join_images(store: Store, entries: Iterable[tuple[str, Entry]]) -> Iterator[Item]:
    """Read the picture of each (image name, entry): a pair where it is found, else `Missing`. Names may repeat."""
    by_name: dict[str, list[Entry]] = {}
    for name, entry in entries:
        by_name.setdefault(name, []).append(entry)
    for name, found in store.read_wanted(by_name):
        for entry in by_name[name]:
            if isinstance(found, NotFound):
                yield Missing(entry.id, name, found.reason, entry.split)
            else:
                yield entry.with_image(found)
