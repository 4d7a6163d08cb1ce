"""What every source declares, and the few things that sources share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shards.location import Location, expand, is_pattern
from shards.names import NotFound
from shards.pair import Entry, Item, Missing
from shards.remote.base import RemotePath
from shards.remote.patience import say
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
    """What a user asked a source for. `options` holds a value for every option that the source declares.

    With `by_default` nobody stated `source`: it is the source's home.
    """

    source: Location | None
    images: Location | None
    options: Mapping[str, str]
    by_default: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A source being read: its items in a stable order, and how many there will be where that is known beforehand.

    `pieces`, where a source has them, can be opened apart, such as the tars of a set; one after the other they give the
    items. Parts of a set are runs of pieces then, and each reads its own alone.
    """

    items: Iterator[Item]
    wanted: int | None = None
    pieces: Sequence[Callable[[], Iterator[Item]]] = ()

    @classmethod
    def of(cls, pieces: Sequence[Callable[[], Iterator[Item]]], wanted: int | None = None) -> Reading:
        """The reading of a source that has pieces."""
        return cls((item for piece in pieces for item in piece()), wanted, pieces)

    def __iter__(self) -> Iterator[Item]:
        return self.items


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set, or one family of files, that pairs can be read from.

    `licence` is the data's own; `needs` says in one line what to install or download and where to point SOURCE. `read`
    raises ValueError or FileNotFoundError, with that line, when something is not there. `packages` are Python packages
    whose versions decide the data. `published` is the size of each split as its authors state it, where they do.
    `home` is the address of the official files, where they are free: without SOURCE, and with nothing in the default
    places, the source reads from there, or from `<mirror>/<name>/` where the variable PIPELINE_MIRROR names a mirror.
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
    home: str = ""


UNLISTED = "unlisted"
"""Split of what the official lists of splits do not name: written, but never trained or tested on by accident."""


def splits_option(*splits: str, default: str = "") -> Option:
    """The option `splits`: which of the data set's own splits are written, all by default."""
    return Option(default or ",".join(splits), "which splits, separated by commas", splits, several=True)


def wanted_splits(request: Request) -> tuple[str, ...]:
    """What `splits_option` was answered with."""
    return tuple(request.options["splits"].split(","))


def find_source(request: Request, name: str, needs: str) -> Location:
    """The stated SOURCE or official place, else `data/<name>`, else `$DATA_DIR/<name>`.

    Raises:
        FileNotFoundError: It is not there; the message carries `needs`.
    """
    if isinstance(request.source, RemotePath):
        return _remote_source(request.source, name, needs)
    places = [request.source] if request.source else default_places(name)
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f"{' and '.join(map(str, places))} not found. {name} needs: {needs}")


def _remote_source(place: RemotePath, name: str, needs: str) -> RemotePath:
    """A place elsewhere, once it has answered. What a web folder says of itself does not matter: its files do."""
    announce(name, place)
    try:
        if not place.is_pattern:
            place.version()
    except OSError as error:
        if isinstance(error, ConnectionError) or not place.is_dir():
            raise type(error)(f"{error}. {name} needs: {needs}") from error
    return place


def source_files(request: Request, name: str, needs: str, *suffixes: str) -> list[Location]:
    """The files that SOURCE stands for, in order: one, those of a folder with these suffixes, or those of a pattern.

    Raises:
        FileNotFoundError: One is not there; the message carries `needs`.
        ValueError: There are none, or they cannot be listed.
    """
    stated = request.source
    place = stated if isinstance(stated, Path) and is_pattern(stated) else find_source(request, name, needs)
    try:
        return expand(place, *suffixes)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{error}. {name} needs: {needs}") from error


def announce(name: str, *places: Location | None) -> None:
    """Say which places elsewhere a data set is read from."""
    for place in places:
        if isinstance(place, RemotePath):
            say(f"{name}: reading from {place}")


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
