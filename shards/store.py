"""Where bytes come from: a folder, a tar (plain or compressed), a zip, here or elsewhere; nothing is unpacked."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from shards.archives import TarStore, ZipStore
from shards.folder import FolderStore
from shards.location import Location, open_seekable, open_stream
from shards.names import NotFound
from shards.remote.base import RemotePath

ARCHIVE_KINDS = "a folder, .tar, .tar.gz or .zip"


class Store(Protocol):
    """A set of files that can be walked once, in order."""

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """Yield every wanted name once: with the file's bytes, in the order that is cheapest, then those not found.

        Names are matched as `shards.names` says.

        Raises:
            ValueError: The store is damaged, or (tar only) two of its files answer to one name.
        """
        ...

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """Yield path and bytes of each file whose path ends like one of the patterns, such as `annotations/*.json`."""
        ...

    def first_names(self, count: int) -> list[str]:
        """The paths of the first few files, to show what is there."""
        ...


class JoinedStore:
    """Several stores as one: what one of them does not hold is looked for in the next."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = stores

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """See `Store`. A name that none holds carries the last store's reason."""
        left: dict[str, NotFound] = dict.fromkeys(wanted, NotFound("not looked for"))
        for store in self.stores:
            for name, found in store.read_wanted(list(left)):
                if isinstance(found, NotFound):
                    left[name] = found
                else:
                    del left[name]
                    yield name, found
        yield from left.items()

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """See `Store`. One store after the other."""
        for store in self.stores:
            yield from store.iter_files(*patterns)

    def first_names(self, count: int) -> list[str]:
        """See `Store`."""
        return [name for store in self.stores for name in store.first_names(count)][:count]


def open_store(path: Location) -> Store:
    """Open a folder or an archive; the kind of an archive is read from its bytes, not from its name.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is a file, but not an archive.
        OSError: It is elsewhere and cannot be read; the message names the address.
    """
    if path.is_dir():
        return FolderStore(path)
    if isinstance(path, RemotePath):
        path.version()  # says what is wrong with the address
    elif not path.exists():
        raise FileNotFoundError(f"{path} does not exist; point at {ARCHIVE_KINDS}")
    if _is_tar(path):
        return TarStore(path)
    if _is_zip(path):
        return ZipStore(path)
    raise ValueError(f"{path} is not {ARCHIVE_KINDS}; if it was downloaded, fetch it again")


def is_archive(path: Location) -> bool:
    """Whether a file is a tar or a zip, by its bytes."""
    return _is_tar(path) or _is_zip(path)


def _is_tar(path: Location) -> bool:
    with open_stream(path) as file:
        try:
            tarfile.open(fileobj=file, mode="r|*").close()
        except (tarfile.TarError, EOFError, zlib.error):
            return False
        return True


def _is_zip(path: Location) -> bool:
    """A remote zip is known by its first bytes, a local one also with something put before it."""
    if isinstance(path, RemotePath):
        with open_stream(path) as file:
            return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
    with open_seekable(path) as file:
        return zipfile.is_zipfile(file)
