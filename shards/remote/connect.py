"""One answer to one request for a file or a part of it: what passes is waited out, what does not is an error."""

from __future__ import annotations

import email.utils
import re
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from shards.remote.base import Version
from shards.remote.causes import cause, hopeless
from shards.remote.patience import PASSING, Limits, Patience

if TYPE_CHECKING:
    from requests import Response, Session

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file from `start` up to, not including, `stop`; without `stop`, to its end."""

    start: int = 0
    stop: int | None = None


def connect(
    url: str, shown: str, patience: Patience, limits: Limits, part: Part, version: Version | None = None
) -> Response:
    """An answer with a body, or 416: there are no such bytes. Redirects are followed, passing troubles waited out.

    Args:
        url: With whatever gives access.
        shown: The address as messages name it.
        patience: Says what went wrong, and how often it may.
        limits: Its timeout.
        part: Asked for; what comes may be the whole file (200).
        version: Where it is known, bytes of another version are not wanted: the server then sends the whole file.

    Raises:
        FileNotFoundError: 404, 410.
        PermissionError: 401, 403.
        OSError: Another status, no such host, or the tries are used up.
    """
    import requests

    headers = {"Accept-Encoding": "identity"}  # the file's own bytes, not a compressed transfer of them
    if part != Part():
        headers["Range"] = f"bytes={part.start}-{'' if part.stop is None else part.stop - 1}"
        if version and version.etag and not version.etag.startswith("W/"):
            headers["If-Range"] = version.etag
    while True:
        ask_again_after = None
        try:
            timeout = (limits.timeout, limits.timeout)
            response = _session().get(url, headers=headers, stream=True, timeout=timeout)
        except (requests.Timeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            if hopeless(error):
                raise ConnectionError(f"{shown}: {hopeless(error)}") from error
            reason = cause(error)
        except requests.RequestException as error:
            raise OSError(f"{shown} cannot be read: {cause(error)}; check the address") from error
        else:
            if response.status_code in (200, 206, 416):
                return response
            response.close()
            reason = _status(response)
            if response.status_code not in PASSING:
                raise _refusal(response, shown)
            ask_again_after = _retry_after(response)
        patience.wait(reason, ask_again_after)


def version_of(response: Response) -> Version:
    """What an answer says of the file: its whole size, also where it holds a part."""
    size = None
    if response.status_code in (206, 416):
        total = content_range(response).rpartition("/")[2]
        size = int(total) if total.isdecimal() else None
        if response.status_code == 416:
            return Version(size)
    elif response.headers.get("Content-Length", "").isdecimal():
        size = int(response.headers["Content-Length"])
    return Version(size, response.headers.get("ETag"), response.headers.get("Last-Modified"))


def _session() -> Session:
    """One per thread: connections are used again, and proxies, certificates and netrc are read once."""
    import requests

    if not hasattr(_local, "session"):
        _local.session = requests.Session()
    session: Session = _local.session
    return session


def content_range(response: Response) -> str:
    """The header, such as "bytes 5-9/100"; empty where there is none."""
    return response.headers.get("Content-Range", "")


def range_start(response: Response) -> int | None:
    """Where the bytes of a partial answer begin in the file."""
    found = re.match(r"bytes (\d+)-", content_range(response))
    return int(found.group(1)) if found else None


def _retry_after(response: Response) -> float | None:
    """Seconds, from either form of the header."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _status(response: Response) -> str:
    try:
        phrase = HTTPStatus(response.status_code).phrase
    except ValueError:
        phrase = response.reason or ""
    return f"answered {response.status_code} {phrase}".rstrip()


def _refusal(response: Response, shown: str) -> OSError:
    status = _status(response)
    if response.status_code in (401, 403):
        return PermissionError(
            f"{shown} {status}: it asks for consent or a login; get it in a browser and state the file, "
            "or state an address that carries the access"
        )
    if response.status_code in (404, 410):
        return FileNotFoundError(f"{shown} {status}: check the address")
    return OSError(f"{shown} {status}: check the address, or download the file and state it")
