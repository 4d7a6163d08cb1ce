"""The same set from a folder and from a store that fsspec knows; what a receipt says of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shards.location import location
from shards.pair import Missing
from shards.remote.base import RemotePath
from shards.writer import write_set
from tests.shards.elsewhere import content, docci, publish, upload
from tests.shards.http_server import WebServer
from tests.shards.layouts import write_jsonl, write_tar, write_tree, write_zip
from tests.shards.layouts_dense import docci_files, goal_test
from tests.shards.reading import pairs, read_items
from tests.shards.real import picture
from tests.shards.s3 import BUCKET, serve_s3


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "zip"])
def test_a_set_from_a_store_is_the_local_one(kind: str, memory: str, tmp_path: Path) -> None:
    lists, pictures = docci_files()
    folder = write_tree(tmp_path / "docci", lists)
    if kind == "folder":
        write_tree(folder, pictures)
    elif kind == "zip":
        write_zip(tmp_path / "docci_images.zip", pictures)
    else:
        write_tar(folder / "docci_images.tar.gz", pictures, "w:gz" if kind == "tar.gz" else "w")
    images = str(tmp_path / "docci_images.zip") if kind == "zip" else None
    write_set("docci", source=str(folder), images=images, out=str(tmp_path / "local"))
    source = upload(f"{memory}/docci", tmp_path / "docci")
    if images:
        fsspec.filesystem("memory").put(images, f"{memory}/docci_images.zip")
        images = f"{memory}/docci_images.zip"
    write_set("docci", source=source, images=images, out=str(tmp_path / "store"))
    assert content(tmp_path / "store") == content(tmp_path / "local")


def test_a_store_is_listed_where_names_differ(memory: str, tmp_path: Path) -> None:
    rows = goal_test()
    pictures = {f"deep/photos/sa_{number}.jpg": picture(number) for number in (1, 2, 3)}
    source = write_tree(tmp_path / "goal", {"test.json": json.dumps(rows).encode()}) / "test.json"
    images = upload(memory, write_tree(tmp_path / "pictures", pictures))
    found = pairs(read_items("goal-json", source, images))
    assert [pair.image for pair in found.values()] == list(pictures.values())
    lists = upload(f"{memory}/lists", tmp_path / "goal")
    again = pairs(read_items("goal-json", None, images, test=f"{lists}/test.json"))
    assert again == found


def test_a_receipt_says_what_was_read_and_notices_a_newer_file(web: WebServer, memory: str, tmp_path: Path) -> None:
    rows = [{"image": "1.jpg", "caption": "x"}]
    folder = write_tree(tmp_path / "in", {"1.jpg": picture(1)})
    write_jsonl(folder / "list.jsonl", rows)
    publish(web, "set", folder)
    web.etags["set/list.jsonl"] = '"one"'
    arguments = {"source": web.url("set/list.jsonl?token=S3CR3T"), "out": str(tmp_path / "out")}
    write_set("pairs", **arguments)
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    size = len(web.files["set/list.jsonl"])
    assert json.loads(manifest)["request"]["source"] == {
        "url": web.url("set/list.jsonl"),
        "bytes": size,
        "etag": '"one"',
    }
    assert "S3CR3T" not in manifest
    arguments["source"] = web.url("set/list.jsonl?token=AN0TH3R")
    assert write_set("pairs", **arguments).already_there
    web.etags["set/list.jsonl"] = '"two"'
    with pytest.raises(ValueError, match=r"source 'http.*/set/list\.jsonl' has changed since"):
        write_set("pairs", **arguments)
    upload(memory, folder)
    write_set("pairs", source=f"{memory}/list.jsonl", out=str(tmp_path / "store"))
    stored = json.loads((tmp_path / "store" / "manifest.json").read_text())["request"]["source"]
    assert (stored["url"], stored["bytes"]) == (f"{memory}/list.jsonl", size)


def test_places_that_are_not_there_or_not_known(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{memory}/x\.jsonl does not exist; check the address.* pairs needs:"):
        read_items("pairs", f"{memory}/x.jsonl")
    with pytest.raises(ValueError, match=r"nosuch://a/b cannot be opened: Protocol not known: nosuch"):
        location("nosuch://a/b")
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as where it is not installed
    with pytest.raises(ValueError, match=r"gs:// needs a package that is not installed: pip install gcsfs"):
        location("gs://bucket/set")
    assert location("file:///data/a%20b.tar") == Path("/data/a b.tar")
    assert location("~/x") == Path("~/x").expanduser()


def test_a_picture_that_a_store_lacks_is_missing(memory: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "list.jsonl", [{"image": name, "caption": "x"} for name in ("1.jpg", "2.jpg")])
    upload(memory, write_tree(tmp_path / "in", {"1.jpg": picture(1)}))
    first, second = read_items("pairs", source, memory)
    assert first.image == picture(1)
    assert isinstance(second, Missing)
    assert second.reason == f"not in {memory}, which holds 1 files: 1.jpg"


def test_a_set_from_s3_is_the_local_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = docci(tmp_path)
    write_set("docci", source=str(folder), out=str(tmp_path / "local"))
    with serve_s3(monkeypatch) as server:
        for path in folder.iterdir():
            server.client().put_object(Bucket=BUCKET, Key=f"in/{path.name}", Body=path.read_bytes())
        write_set("docci", source=f"s3://{BUCKET}/in", out=str(tmp_path / "store"))
        assert content(tmp_path / "store") == content(tmp_path / "local")
        with pytest.raises(FileNotFoundError, match=rf"s3://{BUCKET}/none\.tar does not exist; check the address"):
            read_items("docci", f"s3://{BUCKET}/none.tar")
        server.allowed = -1
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(PermissionError, match=rf"s3://{BUCKET}/in/x\.tar is refused .*check the credentials"):
            read_items("docci", f"s3://{BUCKET}/in/x.tar")


class Unsteady(MemoryFileSystem):
    """The file system in memory behind a connection that breaks as often as `breaks` says."""

    protocol = "unsteady"
    cachable = False
    breaks: ClassVar[list[Exception]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("unsteady://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        if self.breaks:
            raise self.breaks.pop()
        data: bytes = super().cat_file(path, start, end, **kwargs)
        return data


def test_a_store_is_asked_again_after_what_passes(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    cut_off = pytest.importorskip("aiohttp").ClientPayloadError("cut off")
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "0.001")
    monkeypatch.setenv("PIPELINE_HTTP_TRIES", "3")
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    data = bytes(range(256)) * 40_000  # three blocks
    place = location("unsteady://x/data.bin")
    assert isinstance(place, RemotePath)
    fsspec.filesystem("memory").pipe("/x/data.bin", data)
    try:
        Unsteady.breaks[:] = [ConnectionResetError("reset by peer"), cut_off]
        with place.open() as file:
            assert file.read() == data
        assert "unsteady://x/data.bin: reset by peer; try 3 of 3 in 0.0 s" in capsys.readouterr().err
        Unsteady.breaks[:] = [ConnectionResetError("reset by peer")] * 3
        with pytest.raises(ConnectionError, match=r"data\.bin: reset by peer; given up after 3 tries"):
            place.read_bytes()
        Unsteady.breaks[:] = [RuntimeError("no credentials")]
        with pytest.raises(OSError, match=r"data\.bin cannot be read \(RuntimeError: no credentials\); check access"):
            place.read_bytes()
    finally:
        Unsteady.breaks.clear()
        fsspec.filesystem("memory").rm("/x", recursive=True)
