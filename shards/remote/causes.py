"""What lies at the bottom of an error of the network libraries, in a few words."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from http.client import IncompleteRead


def cause(error: BaseException) -> str:
    """The innermost reason: the libraries wrap it in each other's errors, objects and addresses of memory."""
    for inner in _chain(error):
        if isinstance(inner, TimeoutError) or "timed out" in str(inner).lower():
            return "no byte came for too long"
        if isinstance(inner, IncompleteRead):
            return "it ended early"
    text = re.sub(r"<[^>]*> ?:? ?", "", str(list(_chain(error))[-1])).strip(": ")
    return text or type(error).__name__


def hopeless(error: BaseException) -> str:
    """Why no other try can cure it, or nothing: a host without an address, a certificate that is not accepted."""
    from urllib3.exceptions import NameResolutionError

    for inner in _chain(error):
        if isinstance(inner, NameResolutionError | socket.gaierror):
            return "no such host, or no connection to the net; check the address"
        if isinstance(inner, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted ({inner.verify_message})"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and the ones within, outermost first."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        yield inner
        seen.add(id(inner))
        within = (getattr(inner, "reason", None), *inner.args, inner.__cause__)
        inner = next((arg for arg in within if isinstance(arg, BaseException)), None)
