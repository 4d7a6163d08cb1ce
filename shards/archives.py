"""Files inside a tar or a zip, read in place, wherever it lies."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice

from shards.location import Location, open_seekable, open_stream
from shards.names import Grade, NotFound, Seen, Wanted, is_junk, matches_any, not_found, resolve
from shards.remote.base import RemotePath
from shards.remote.patience import say

_READ_AT_ONCE = 1 << 18
"""Bytes that a tar's stream is read in."""


class TarStore:
    """A tar, read front to back as a stream: a compressed one is decompressed once, a remote one never touches disk."""

    def __init__(self, path: Location) -> None:
        self.path = path

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """See `shards.store.Store`. Only names whose folders differ from the archive's need a second pass."""
        index = Wanted(wanted)
        served: dict[str, tuple[str, Grade]] = {}
        weak: dict[str, dict[str, None]] = {}  # name -> the members that share only its last component, in order
        seen = Seen()
        with self._stream() as tar:
            for member in _regular_files(tar):
                seen.add(member.name)
                data: bytes | None = None
                for name, grade in index.match(member.name):
                    if grade is Grade.BASENAME:
                        # A better file may still come, and a stream cannot go back for this one: decide at the end.
                        weak.setdefault(name, {})[member.name] = None
                    elif name not in served:
                        data = _extract(tar, member) if data is None else data
                        served[name] = (member.name, grade)
                        yield name, data
                    else:
                        self._contest(name, *served[name], member.name)
        later = {}
        for name in dict.fromkeys(wanted):
            if name not in served:
                files = list(weak.get(name, ()))
                if len(files) == 1:
                    later[name] = files[0]
                else:
                    yield name, not_found(files, self.path, seen)
        if later:
            if isinstance(self.path, RemotePath):
                say(f"{self.path}: once more, for {len(later)} files whose folders are called otherwise in the list")
            yield from self._read_members(later)

    def _contest(self, name: str, first: str, grade: Grade, second: str) -> None:
        # The same path twice is an appended copy of a file; the exact path beats any other.
        if grade is not Grade.SAME and first != second:
            raise ValueError(
                f"{self.path} holds both {first} and {second}, and {name!r} may mean either; "
                "unpack the archive and point at the folder that is meant"
            )

    def _read_members(self, member_of: dict[str, str]) -> Iterator[tuple[str, bytes]]:
        names_of: dict[str, list[str]] = {}
        for name, member_name in member_of.items():
            names_of.setdefault(member_name, []).append(name)
        with self._stream() as tar:
            for member in _regular_files(tar):
                names = names_of.pop(member.name, [])
                if names:
                    data = _extract(tar, member)
                    yield from ((name, data) for name in names)

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """See `shards.store.Store`. The order is the archive's."""
        with self._stream() as tar:
            for member in _regular_files(tar):
                if matches_any(member.name, patterns):
                    yield member.name, _extract(tar, member)

    def first_names(self, count: int) -> list[str]:
        """See `shards.store.Store`."""
        with self._stream() as tar:
            return [member.name for member in islice(_regular_files(tar), count)]

    @contextmanager
    def _stream(self) -> Iterator[tarfile.TarFile]:
        try:
            with open_stream(self.path) as file, tarfile.open(fileobj=file, mode="r|*", bufsize=_READ_AT_ONCE) as tar:
                yield tar
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path} is damaged or incomplete ({error}); fetch it again") from error


class ZipStore:
    """A zip, read in the order in which its files lie."""

    def __init__(self, path: Location) -> None:
        self.path = path

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """See `shards.store.Store`."""
        with self._open() as archive:
            members = _zip_names(archive)
            found, several = resolve(wanted, members)
            names_of: dict[str, list[str]] = {}
            for name, member in found.items():
                names_of.setdefault(member, []).append(name)
            for member in members:
                names = names_of.get(member, [])
                if names:
                    data = archive.read(member)
                    yield from ((name, data) for name in names)
            for name in dict.fromkeys(wanted):
                if name not in found:
                    yield name, not_found(several.get(name, ()), self.path, Seen(members))

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """See `shards.store.Store`. The order is the archive's."""
        with self._open() as archive:
            for member in _zip_names(archive):
                if matches_any(member, patterns):
                    yield member, archive.read(member)

    def first_names(self, count: int) -> list[str]:
        """See `shards.store.Store`."""
        with self._open() as archive:
            return _zip_names(archive)[:count]

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with open_seekable(self.path) as file, zipfile.ZipFile(file) as archive:
                yield archive
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path} is damaged or incomplete ({error}); fetch it again") from error
        except (NotImplementedError, RuntimeError) as error:  # zipfile's own: an unknown compression, a password
            raise ValueError(f"{self.path} cannot be read ({error}); unpack it and point at the folder") from error


def _regular_files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if member.isreg() and not is_junk(member.name):
            yield member
        # The library keeps every header that it has read: a gigabyte for a million files.
        tar.members = []  # type: ignore[attr-defined]


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "only regular files are extracted"
    return file.read()


def _zip_names(archive: zipfile.ZipFile) -> list[str]:
    by_offset = sorted(archive.infolist(), key=lambda info: info.header_offset)
    return list(dict.fromkeys(info.filename for info in by_offset if not info.is_dir() and not is_junk(info.filename)))
