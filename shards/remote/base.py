"""A file or folder elsewhere, with the few methods of `pathlib.Path` that reading a data set needs."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import splitext
from typing import Any


@dataclass(frozen=True, slots=True)
class Version:
    """What tells a file from a later one at the same address, as far as the server says it. `size` is in bytes."""

    size: int | None = None
    etag: str | None = None
    modified: str | None = None

    def difference(self, other: Version) -> str:
        """What both know and say otherwise, in words; empty where they may be the same."""
        fields = (
            ("size", self.size, other.size),
            ("ETag", self.etag, other.etag),
            ("Last-Modified", self.modified, other.modified),
        )
        for name, mine, theirs in fields:
            if mine is not None and theirs is not None and mine != theirs:
                return f"{name} was {mine}, now {theirs}"
        return ""

    def filled_from(self, other: Version) -> Version:
        """This, with what only the other knows."""
        size = other.size if self.size is None else self.size
        return Version(size, self.etag or other.etag, self.modified or other.modified)


class RemotePath(ABC):
    """A place in a remote store. `str()` is its address without what gives access."""

    url: str
    """The address as it was stated, with what gives access."""

    can_list: bool
    """Whether the names in a folder can be asked for."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last component."""

    @property
    def suffix(self) -> str:
        """The extension of the name, with its dot."""
        return splitext(self.name)[1]

    @property
    @abstractmethod
    def parent(self) -> RemotePath:
        """The folder that holds this."""

    @property
    @abstractmethod
    def is_pattern(self) -> bool:
        """Whether the address stands for several files: braces, or `*` and `[` where they can be looked up."""

    @abstractmethod
    def __truediv__(self, name: str) -> RemotePath: ...

    @abstractmethod
    def version(self) -> Version:
        """Size and version of the file, asked for once.

        Raises:
            FileNotFoundError: Nothing is there.
            PermissionError: It is not for everybody.
            OSError: Anything else; every message names the address.
        """

    @abstractmethod
    def is_dir(self) -> bool:
        """Whether this is a folder."""

    def is_file(self) -> bool:
        """Whether there is a file. That it is not for everybody is an error, as in `version`."""
        if self.is_dir():
            return False
        try:
            self.version()
        except FileNotFoundError:
            return False
        return True

    def exists(self) -> bool:
        """Whether a file or folder is there."""
        return self.is_dir() or self.is_file()

    @abstractmethod
    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The file as a stream, front to back, that outlives dropped connections."""

    @abstractmethod
    def open_seekable(self) -> io.BufferedReader:
        """The file with `seek`, fetched in blocks.

        Raises:
            OSError: The server does not give parts of files.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Forget what was listed before: what is there is asked for anew."""

    def read_bytes(self) -> bytes:
        """All of the file."""
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the file, decoded."""
        return self.read_bytes().decode(encoding)

    @abstractmethod
    def walk(self) -> Iterator[str]:
        """The paths of all files below this folder, relative to it, sorted; none where it cannot be listed."""

    @abstractmethod
    def expand(self) -> list[RemotePath]:
        """The files that a pattern stands for, in order.

        Raises:
            ValueError: It has a `*`, which this kind of place cannot look up.
        """

    def record(self) -> dict[str, Any]:
        """Address, and size and version where this is one file and the server says them: for a receipt."""
        record: dict[str, Any] = {"url": str(self)}
        if self.is_pattern or self.is_dir():
            return record
        version = self.version()
        known = {"bytes": version.size, "etag": version.etag, "modified": version.modified}
        return record | {key: value for key, value in known.items() if value is not None}
