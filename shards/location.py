"""Where something is: a path on this machine, a web address, or a place in a file system that fsspec knows."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shards.names import natural_key
from shards.remote.base import RemotePath

Location = Path | RemotePath
"""Both have `/`, `name`, `suffix`, `parent`, `exists`, `is_file`, `is_dir`, `open("rb")`, `read_bytes`."""


def location(text: str) -> Location:
    """The place that a text means: whatever has a "://" is elsewhere, except for file://.

    Raises:
        ValueError: A scheme that nothing knows, or whose package is not installed; the message names it.
    """
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if not scheme:
        return Path(text).expanduser()
    if scheme in ("http", "https"):
        from shards.remote.http import HttpPath

        return HttpPath(text)
    if scheme == "file":
        return Path(url2pathname(urlsplit(text).path))
    from shards.remote.filesystem import FsspecPath

    return FsspecPath(text)


def can_list(place: Location) -> bool:
    """Whether the names in a folder can be asked for; on the web they cannot."""
    return isinstance(place, Path) or place.can_list


def is_there(place: Location) -> bool:
    """Whether something that need not be there can be read. Stores answer "forbidden" for what they do not have."""
    try:
        return place.exists()
    except PermissionError:
        return False


def open_seekable(place: Location) -> IO[bytes]:
    """The file, to be read from any place."""
    return place.open("rb") if isinstance(place, Path) else place.open_seekable()


def open_stream(place: Location) -> io.BufferedReader:
    """The file, to be read front to back."""
    return place.open("rb")


def walk(root: Location) -> Iterator[str]:
    """The paths of all files below a folder, relative to it. Sorted by name, numbers by value; links are followed."""
    if isinstance(root, RemotePath):
        yield from root.walk()
        return
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders.sort(key=natural_key)
        for file in sorted(files, key=natural_key):
            yield (Path(folder) / file).relative_to(root).as_posix()


def expand(place: Location, *suffixes: str) -> list[Location]:
    """The files that a place stands for, in order: braces and `*` are expanded, a folder is its files of these kinds.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: A folder without such files; a web folder, or a `*` on the web: their files cannot be listed.
    """
    files: list[Location] = []
    for match in _matches(place):
        if not match.is_dir():
            files.append(match)
        elif can_list(match):
            files += [match / name for name in walk(match) if name.endswith(suffixes)]
        else:
            raise ValueError(f"{match}: a web folder cannot be listed; state its files: .../name-{{0000..0063}}.ext")
    if not files:
        raise ValueError(f"{place} holds no {' or '.join(suffixes)} files")
    return files


def is_pattern(place: Location) -> bool:
    """Whether a place stands for several files by braces or `*`."""
    if isinstance(place, RemotePath):
        return place.is_pattern
    return any(mark in str(place) for mark in "{*?[") and not place.exists()


def _matches(place: Location) -> list[Location]:
    if isinstance(place, RemotePath):
        return list(place.expand()) if place.is_pattern else [place]
    if place.exists():
        return [place]
    from braceexpand import braceexpand

    paths: list[Location] = []
    for text in braceexpand(str(place)):
        paths += [Path(path) for path in sorted(glob.glob(text, recursive=True), key=natural_key)] or [Path(text)]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    return paths


def record(place: Location | None) -> dict[str, Any] | None:
    """A place as a receipt keeps it: an edited file is another one, a folder or a pattern is known by its name."""
    if place is None:
        return None
    if isinstance(place, RemotePath):
        return place.record()
    record: dict[str, Any] = {"path": os.path.abspath(place)}
    if place.is_file():
        stat = place.stat()
        record |= {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    return record
