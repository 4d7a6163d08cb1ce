"""Places in any file system that fsspec knows: s3://, gs://, hf://, memory:// and the rest."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from shards.names import natural_key
from shards.remote.base import RemotePath, Version
from shards.remote.blocks import BLOCK, BlockFile
from shards.remote.causes import cause, hopeless
from shards.remote.patience import PASSING, Limits, Patience

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_T = TypeVar("_T")
_PASSWORD = re.compile(r"(?<=//)([^/@:]*):[^/@]*@")


class FsspecPath(RemotePath):
    """A file or folder of a file system. Credentials and endpoints are its own: environment, configuration files."""

    can_list = True

    def __init__(self, url: str, filesystem: AbstractFileSystem | None = None) -> None:
        self.url = url
        self.limits = Limits.from_environment()
        self._fs = filesystem or open_filesystem(url)

    def __str__(self) -> str:
        return without_password(self.url)

    __repr__ = __str__

    @property
    def filesystem(self) -> AbstractFileSystem:
        """fsspec's file system; there is one for all places of a store."""
        return self._fs

    @property
    def path(self) -> str:
        """The place as its file system names it."""
        return str(self._fs._strip_protocol(self.url))

    @property
    def name(self) -> str:
        """See `RemotePath`."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> FsspecPath:
        """See `RemotePath`."""
        return FsspecPath(self._fs.unstrip_protocol(self._fs._parent(self.path)), self._fs)

    @property
    def is_pattern(self) -> bool:
        """See `RemotePath`."""
        return any(mark in self.url for mark in "{*[")

    def __truediv__(self, name: str) -> FsspecPath:
        if name in ("", "."):
            return self
        return FsspecPath(f"{self.url.rstrip('/')}/{name.replace(chr(92), '/').lstrip('/')}", self._fs)

    @cached_property
    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._asked(lambda: self._fs.info(self.path))
        return info

    def version(self) -> Version:
        """See `RemotePath`."""
        return _version(self._info)

    def refresh(self) -> None:
        """See `RemotePath`."""
        self.__dict__.pop("_info", None)
        self._fs.invalidate_cache()

    def is_dir(self) -> bool:
        """See `RemotePath`."""
        try:
            return not self.is_pattern and self._info.get("type") == "directory"
        except FileNotFoundError:
            return False

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """See `RemotePath`."""
        return self._blocks(2)

    def open_seekable(self) -> io.BufferedReader:
        """See `RemotePath`."""
        return self._blocks(16)

    def _blocks(self, num_blocks: int) -> io.BufferedReader:
        size = self.version().size
        if size is None:
            raise OSError(f"{self}: its size is not known; download it and state the file")

        def fetch(start: int, end: int) -> bytes:
            # By name: the file system of S3 has another argument in the second place.
            data: bytes = self._asked(partial(self._fs.cat_file, self.path, start=start, end=end))
            if end >= size > BLOCK:
                self._check_unchanged()  # stores cannot be asked for a block of a version
            return data

        return io.BufferedReader(BlockFile(str(self), fetch, size, num_blocks))

    def _check_unchanged(self) -> None:
        self._fs.invalidate_cache(self._fs._parent(self.path))
        if how := self.version().difference(_version(self._asked(lambda: self._fs.info(self.path)))):
            raise OSError(f"{self} changed while it was read ({how}); run again to read the new one")

    def read_bytes(self) -> bytes:
        """See `RemotePath`."""
        data: bytes = self._asked(lambda: self._fs.cat_file(self.path))
        return data

    def walk(self) -> Iterator[str]:
        """See `RemotePath`."""
        root = self.path.rstrip("/") + "/"
        files: list[str] = self._asked(lambda: self._fs.find(self.path))
        return iter(sorted((file.removeprefix(root) for file in files), key=natural_key))

    def expand(self) -> list[RemotePath]:
        """See `RemotePath`."""
        from braceexpand import braceexpand

        paths: list[RemotePath] = []
        for url in braceexpand(self.url):
            place = FsspecPath(url, self._fs)
            if "*" in url or "[" in url:
                found: list[str] = self._asked(partial(self._fs.glob, place.path))
                files = sorted(found, key=natural_key)
                paths += [FsspecPath(self._fs.unstrip_protocol(file), self._fs) for file in files]
            else:
                paths.append(place)
        return paths

    def _asked(self, ask: Callable[[], _T]) -> _T:
        """The answer of the store; what may pass is tried again, as for web addresses."""
        patience = Patience(str(self), self.limits)
        while True:
            try:
                return ask()
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{self} does not exist; check the address") from error
            except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
                raise self._refusal(error) from error
            except OSError as error:
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if 400 <= status < 500 and status not in PASSING:
                    raise self._refusal(error) from error
                if hopeless(error):
                    raise ConnectionError(f"{self}: {hopeless(error)}") from error
                reason = cause(error)
            except Exception as error:
                # The clients behind fsspec have error classes of their own (no credentials, no such bucket).
                if not _is_network(error):
                    name = type(error).__name__
                    raise OSError(f"{self} cannot be read ({name}: {error}); check access and address") from error
                reason = cause(error)
            patience.wait(reason)

    def _refusal(self, error: OSError) -> PermissionError:
        return PermissionError(f"{self} is refused ({error}); check the credentials and the address")


def _version(info: dict[str, Any]) -> Version:
    known = {key.lower(): value for key, value in info.items()}
    etag = next((str(known[key]) for key in ("etag", "sha256", "blob_id", "md5hash") if known.get(key)), None)
    times = ("lastmodified", "last_modified", "updated", "mtime", "created")
    modified = next((str(known[key]) for key in times if known.get(key)), None)
    return Version(known.get("size"), etag, modified)


def _is_network(error: Exception) -> bool:
    """Whether an error is of a lost connection, as aiohttp and botocore have them, which need not be installed."""
    kinds = type(error).__mro__
    return any(kind.__module__.partition(".")[0] == "aiohttp" or kind.__name__ == "HTTPClientError" for kind in kinds)


def without_password(url: str) -> str:
    """The address as it may be shown and kept: `sftp://me:secret@host/x` without the secret."""
    return _PASSWORD.sub(r"\1@", url, count=1)


def open_filesystem(url: str) -> AbstractFileSystem:
    """fsspec's file system of a URL.

    Raises:
        ValueError: Nothing knows its scheme, or the package for it is not installed.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0]
    try:
        return url_to_fs(url)[0]
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", protocol).partition(".")[0]
        raise ValueError(f"{protocol}:// needs a package that is not installed: pip install {package}") from error
    except ValueError as error:
        raise ValueError(f"{without_password(url)} cannot be opened: {error}") from error
