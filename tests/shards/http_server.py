"""A real web server on this machine whose troubles are ordered beforehand."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Trouble:
    """What happens to one request.

    `after` is the number of bytes of the body that are sent first; then the connection is `"cut"` (reset), `"ended"`
    (closed in good order, as when a proxy gives up) or `"stalled"` (nothing more comes). With a `status` it is that
    answer instead, with these headers.
    """

    after: int = 0
    then: str = "cut"
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


def cut(after: int) -> Trouble:
    return Trouble(after, "cut")


def ended(after: int) -> Trouble:
    return Trouble(after, "ended")


def stalled(after: int) -> Trouble:
    return Trouble(after, "stalled")


def answer(status: int, **headers: str) -> Trouble:
    return Trouble(status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})


class WebServer:
    """Files by path, without leading slash. `troubles` of a path are used up one a request, in order.

    `ranges` and `lengths` say whether the server gives parts of files and states sizes; `etags` are its ETags; a path
    in `folders` is redirected to itself with a slash, as servers of folders do.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.troubles: dict[str, deque[Trouble]] = defaultdict(deque)
        self.etags: dict[str, str] = {}
        self.folders: set[str] = set()
        self.ranges = True
        self.lengths = True
        self.requests: list[tuple[str, str | None]] = []
        self.released = threading.Event()
        self.address = ""

    def url(self, path: str) -> str:
        return f"{self.address}/{path}"

    def asked(self, path: str) -> list[str | None]:
        """The Range header of each request for a path."""
        return [wanted for asked, wanted in self.requests if asked == path]


@contextmanager
def serving() -> Iterator[WebServer]:
    """A server on a free port; at the end, what stalls is let go."""
    web = WebServer()
    handler = type("Bound", (_Handler,), {"web": web})
    server = _Server(("127.0.0.1", 0), handler)
    web.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        with mock.patch.dict(os.environ, {"NO_PROXY": "*", "no_proxy": "*"}):  # this machine needs none
            yield web
    finally:
        web.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # of the default five, a client with eight threads would wait for seconds


class _Handler(BaseHTTPRequestHandler):
    web: WebServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Nothing: the tests look at `requests`."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        wanted = self.headers.get("Range")
        self.web.requests.append((path, wanted))
        queue = self.web.troubles[path]
        trouble = queue.popleft() if queue else None
        if trouble and trouble.status:
            self._plain(trouble.status, trouble.headers)
        elif path in self.web.folders:
            self._plain(301, {"Location": self.path + "/"})
        elif path not in self.web.files:
            self._plain(404, {})
        else:
            self._file(path, wanted, trouble)

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _file(self, path: str, wanted: str | None, trouble: Trouble | None) -> None:
        data, etag = self.web.files[path], self.web.etags.get(path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        if not self.web.ranges or (etag and self.headers.get("If-Range", etag) != etag):
            asked = None
        start = int(asked.group(1)) if asked else 0
        stop = min(int(asked.group(2)) + 1 if asked and asked.group(2) else len(data), len(data))
        if asked and start >= len(data):
            self._plain(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Connection", "close")
        self.send_header(*(("Content-Length", str(stop - start)) if self.web.lengths else ("X-Length", "unknown")))
        self.end_headers()
        self.close_connection = True
        self._body(data[start:stop], trouble)

    def _body(self, body: bytes, trouble: Trouble | None) -> None:
        try:
            self.wfile.write(body if trouble is None else body[: trouble.after])
            self.wfile.flush()
        except OSError:
            return  # the client has seen enough
        if trouble and trouble.then == "stalled":
            self.web.released.wait()
        elif trouble and trouble.then == "cut":
            # Closing with nothing to linger for sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
