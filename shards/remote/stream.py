"""The body of a web address as one stream, whatever happens to the connections that carry it."""

from __future__ import annotations

import io
from http import HTTPStatus
from typing import TYPE_CHECKING

from shards.remote.base import Version
from shards.remote.causes import cause
from shards.remote.connect import Part, connect, content_range, range_start, version_of
from shards.remote.patience import Limits, Patience

if TYPE_CHECKING:
    from requests import Response

_CHUNK = 256 << 10


class HttpStream(io.RawIOBase):
    """A web address read front to back.

    When a connection drops, stalls or ends early, the next one asks for what is left. A server that sends everything
    again is read past what is known already, and those bytes have to hash to the same: so the stream is the bytes of
    one version of the file, or an error.

    Args:
        url: With whatever gives access.
        shown: The address as messages name it.
        limits: See `shards.remote.patience`.
        version: What is known of the file; an answer that contradicts it is an error.
        part: The part to read; anything but the whole needs a server that gives parts.

    Raises:
        OSError: While reading. FileNotFoundError and PermissionError at once, others when the tries are used up;
            messages name the address, what happened and what to do.
    """

    def __init__(self, url: str, shown: str, limits: Limits, version: Version, part: Part | None = None) -> None:
        from xxhash import xxh3_128

        self._url, self._shown, self._limits, self._version = url, shown, limits, version
        self._part = part or Part()
        self._position = self._part.start
        self._patience = Patience(shown, limits)
        self._new_hash = xxh3_128
        self._hash = xxh3_128()  # of the bytes from the part's start to `_position`
        self._skipped = xxh3_128()  # of the bytes that this connection repeats
        self._to_skip = 0
        self._response: Response | None = None
        self._ended = False

    def readable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Let go of the connection."""
        self._disconnect()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Some of the next bytes, 0 at the end."""
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """What is left. The inherited one asks for 8 kB at a time."""
        return b"".join(iter(lambda: self._next(_CHUNK), b""))

    def _next(self, size: int) -> bytes:
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        while not self._ended:
            response = self._connect() if self._response is None else self._response
            if response is None:
                break
            try:
                data = response.raw.read1(min(self._to_skip or size, _CHUNK), decode_content=False)
            except (HTTPError, RequestException, OSError) as error:
                self._interrupted(cause(error))
                continue
            if self._to_skip and data:
                self._skip(data)
            elif data:
                self._position += len(data)
                self._hash.update(data)
                self._patience.renew()
                return data
            elif self._to_skip:
                raise self._changed("it is shorter now")
            elif self._end is not None and self._position < self._end:
                self._interrupted("it ended early")
            else:
                self._ended = True
        self._disconnect()
        return b""

    @property
    def _end(self) -> int | None:
        """Where the part ends, as far as it is known."""
        ends = [end for end in (self._part.stop, self._version.size) if end is not None]
        return min(ends) if ends else None

    def _connect(self) -> Response | None:
        """A response whose next byte is the wanted one, or comes after those to skip. None where nothing is left."""
        if self._end is not None and self._position >= self._end:
            self._ended = True
            return None
        rest = Part(self._position, self._part.stop)
        response = connect(self._url, self._shown, self._patience, self._limits, rest, self._version)
        self._response = response
        found = version_of(response)
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            if found.size == self._position:
                self._ended = True
                return None
            raise self._changed(f"it has {found.size} bytes now, {self._position} were read")
        difference = self._version.difference(found)
        if difference:
            raise self._changed(difference)
        self._version = self._version.filled_from(found)
        if response.status_code == HTTPStatus.PARTIAL_CONTENT:
            if range_start(response) != self._position:
                raise OSError(f"{self._shown}: asked for bytes from {self._position}, got {content_range(response)!r}")
        elif self._part != Part():
            raise OSError(f"{self._shown}: its server stopped giving parts of files; download it and state the file")
        else:
            self._to_skip, self._skipped = self._position, self._new_hash()
        return response

    def _skip(self, data: bytes) -> None:
        """Pass over bytes that an earlier connection brought; they have to be the same."""
        self._skipped.update(data)
        self._to_skip -= len(data)
        if self._to_skip == 0 and self._skipped.digest() != self._hash.digest():
            raise self._changed("the same place holds other bytes now")

    def _interrupted(self, reason: str) -> None:
        self._disconnect()
        self._patience.wait(f"{reason} at byte {self._position}")

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
        self._to_skip = 0

    def _changed(self, how: str) -> OSError:
        self._disconnect()
        return OSError(f"{self._shown} changed while it was read ({how}); run again to read the new one")
