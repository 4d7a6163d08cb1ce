"""A real S3-compatible server on this machine, whose credentials can be revoked and whose objects can be read aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

BUCKET = "pairs"
CHANGES, ALL = ("PUT", "POST"), ("PUT", "POST", "GET", "HEAD", "DELETE")


class S3Server:
    """moto's server behind a gate: once `allowed` requests of the `counted` methods have passed, all answer 403."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self._app = DomainDispatcherApplication(create_backend_app)
        self.allowed: int | None = None
        self.counted = CHANGES
        self.log: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._gate, threaded=True)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def _gate(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.allowed is not None and method in self.counted:
            self.allowed -= 1
        if self.allowed is not None and self.allowed < 0:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return [] if method == "HEAD" else [body]
        self.log.append((method, path))
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def client(self) -> Any:
        """Another library's view of the server: boto3's."""
        import boto3

        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Every object below a prefix, by the rest of its name."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix + "/")
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {
            name.removeprefix(prefix + "/"): client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names
        }

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serve_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket, named by the environment as users name theirs. Skips where moto is missing."""
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    import fsspec
    import requests

    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        requests.post(f"{server.url}/moto-api/reset", timeout=60).raise_for_status()
        server.client().create_bucket(Bucket=BUCKET)
        server.log.clear()
        yield server
    finally:
        server.close()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
