"""Web addresses. One that ends with "/" is a folder, whose files are asked for by name; any other is a file."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cached_property
from urllib.parse import parse_qsl, quote, unquote, urljoin, urlsplit, urlunsplit

from shards.remote.base import RemotePath, Version
from shards.remote.blocks import BlockFile
from shards.remote.connect import Part, connect, version_of
from shards.remote.patience import Limits, Patience
from shards.remote.stream import HttpStream

_BUFFER = 1 << 20
_ACCESS = re.compile(r"sig|token|secret|passw|credential|expires|policy|key|auth", re.IGNORECASE)


class HttpPath(RemotePath):
    """A file or folder behind http or https. Signed addresses work: what gives access stays with every file below."""

    can_list = False

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        self.url = url
        self.limits = limits or Limits.from_environment()
        self._parts = urlsplit(url)

    def __str__(self) -> str:
        """The address without user, password and signature: it ends up in logs and receipts."""
        host = self._parts.netloc.rpartition("@")[2]
        signed = any(_ACCESS.search(name) for name, _ in parse_qsl(self._parts.query, keep_blank_values=True))
        return urlunsplit(self._parts._replace(netloc=host, query="" if signed else self._parts.query, fragment=""))

    __repr__ = __str__

    @property
    def name(self) -> str:
        """See `RemotePath`."""
        return unquote(self._parts.path.rstrip("/").rpartition("/")[2])

    @property
    def parent(self) -> HttpPath:
        """See `RemotePath`."""
        return self._at(self._parts.path.rstrip("/").rpartition("/")[0] + "/")

    @property
    def is_pattern(self) -> bool:
        """See `RemotePath`."""
        return "{" in self._parts.path or "*" in self._parts.path

    def __truediv__(self, name: str) -> HttpPath:
        if name in ("", "."):
            return self
        folder = self._parts.path.rstrip("/") + "/"
        return self._at(urljoin(folder, quote(name.replace("\\", "/").lstrip("/"))))

    def _at(self, path: str) -> HttpPath:
        return HttpPath(urlunsplit(self._parts._replace(path=path)), self.limits)

    def refresh(self) -> None:
        """See `RemotePath`."""
        self.__dict__.pop("_answer", None)

    @cached_property
    def _answer(self) -> tuple[Version, bool, str] | OSError:
        try:
            response = connect(self.url, str(self), Patience(str(self), self.limits), self.limits, Part(0, 1))
        except (FileNotFoundError, PermissionError) as error:
            return error
        response.close()
        return version_of(response), response.status_code in (206, 416), urlsplit(str(response.url)).path

    @property
    def _seen(self) -> tuple[Version, bool, str]:
        """Version, whether parts are served, and the path after redirects: from one request for the first byte."""
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer

    def version(self) -> Version:
        """See `RemotePath`."""
        return self._seen[0]

    def is_dir(self) -> bool:
        """Whether the address ends with "/", by itself or, as web servers have it, after a redirect."""
        if self._parts.path.endswith("/") or self.is_pattern:
            return self._parts.path.endswith("/")
        return isinstance(self._answer, tuple) and self._answer[2].endswith("/")

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """See `RemotePath`."""
        known = self._seen[0] if "_answer" in self.__dict__ else Version()
        return io.BufferedReader(HttpStream(self.url, str(self), self.limits, known), _BUFFER)

    def open_seekable(self) -> io.BufferedReader:
        """See `RemotePath`."""
        version, in_parts, _ = self._seen
        if version.size is None or not in_parts:
            raise OSError(
                f"{self}: its server gives no parts of files, which a zip or Parquet file needs (its directory is at "
                "the end); download it and state the file"
            )

        def fetch(start: int, end: int) -> bytes:
            with HttpStream(self.url, str(self), self.limits, version, Part(start, end)) as stream:
                return stream.readall()

        return io.BufferedReader(BlockFile(str(self), fetch, version.size))

    def walk(self) -> Iterator[str]:
        """Nothing: the web has no lists of files."""
        return iter(())

    def expand(self) -> list[RemotePath]:
        """See `RemotePath`."""
        from braceexpand import braceexpand

        if "*" in self._parts.path:
            raise ValueError(f"{self}: a web folder cannot be listed, so * finds nothing; use {{0000..0063}}")
        return [HttpPath(url, self.limits) for url in braceexpand(self.url)]
