"""A small set, written from a list of rows with its pictures beside it; a web server, and a store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shards.report import Report
from shards.writer import write_set
from tests.shards.http_server import WebServer, serving
from tests.shards.layouts import write_jsonl, write_tree
from tests.shards.resume import make_source
from tests.shards.s3 import S3Server, serve_s3

Write = Callable[..., Report]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a list of rows with pictures lying beside it, as the source `pairs`, to `tmp_path/out`."""

    def run(rows: list[dict[str, Any]], files: dict[str, bytes], **kwargs: Any) -> Report:
        write_tree(tmp_path / "in", files)
        source = write_jsonl(tmp_path / "in" / "list.jsonl", rows)
        return write_set("pairs", source=str(source), out=str(tmp_path / "out"), **kwargs)

    return run


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "0.001")
    monkeypatch.setenv("PIPELINE_HTTP_TIMEOUT", "20")
    with serving() as server:
        yield server


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in fsspec's file system in memory."""
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(f"/{name}"):
        filesystem.rm(f"/{name}", recursive=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A store; mirrors and unfinished lists lie in `tmp_path`."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with serve_s3(monkeypatch) as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> dict[str, str]:
    """Arguments of `write_set` for a small source."""
    return make_source(tmp_path / "in")


def row(image: str, caption: Any = "a caption", **more: Any) -> dict[str, Any]:
    return {"image": image, "caption": caption, **more}


def siblings(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith("."))
