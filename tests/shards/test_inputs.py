"""The same set from a folder, from the web and from a store: the same shards, byte for byte."""

from __future__ import annotations

import json
import random
import sys
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shards.location import location
from shards.pair import Missing
from shards.remote.base import RemotePath
from shards.writer import write_set
from tests.shards.http_server import WebServer, answer, cut, ended, serving, stalled
from tests.shards.layouts import jpeg, write_jsonl, write_tar, write_tree, write_zip
from tests.shards.layouts_dense import docci_files, goal_test, urban1k_files
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import picture
from tests.shards.s3 import BUCKET, serve_s3


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


def publish(web: WebServer, prefix: str, folder: Path) -> str:
    """Put the files of a folder on the web; gives the folder's address."""
    for path in folder.rglob("*"):
        if path.is_file():
            web.files[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return web.url(f"{prefix}/")


def upload(url: str, folder: Path) -> str:
    filesystem, root = fsspec.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            filesystem.pipe(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


def content(out: Path) -> dict[str, bytes]:
    """Every file of a set but its manifest, which names the source."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def docci(root: Path) -> Path:
    """DOCCI as it lies at its official place; a large file comes first, so that what looks at the tar sees a part."""
    lists, pictures = docci_files()
    folder = write_tree(root / "docci", lists)
    write_tar(folder / "docci_images.tar.gz", {"README": random.Random(3).randbytes(3_000_000), **pictures}, "w:gz")
    return folder


# the web --------------------------------------------------------------------------------------------------------------


def test_a_set_from_a_bad_line_is_the_local_one(web: WebServer, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PIPELINE_HTTP_TIMEOUT", "2")
    folder = docci(tmp_path)
    write_set("docci", source=str(folder), out=str(tmp_path / "local"))
    source = publish(web, "docci", folder)
    size = len(web.files["docci/docci_images.tar.gz"])
    web.troubles["docci/docci_descriptions.jsonlines"] = deque([answer(503, Retry_After="0"), cut(100), ended(300)])
    web.troubles["docci/docci_images.tar.gz"] = deque(
        [
            *(answer(429), answer(302, Location="docci_images.tar.gz"), cut(0), ended(50)),  # while it is looked at
            *(cut(size // 3), stalled(size // 4), ended(size // 4), answer(500)),
        ]
    )
    web.etags["docci/docci_images.tar.gz"] = '"v1"'
    write_set("docci", source=source, out=str(tmp_path / "web"))
    assert content(tmp_path / "web") == content(tmp_path / "local")
    assert not web.troubles["docci/docci_images.tar.gz"], "every trouble was met"
    error = capsys.readouterr().err
    assert f"docci: reading from {source}" in error
    assert write_set("docci", source=source, out=str(tmp_path / "web")).already_there


@pytest.mark.parametrize("ranges", [True, False])
def test_a_tar_without_ranges_and_a_zip_that_needs_them(ranges: bool, web: WebServer, tmp_path: Path) -> None:
    web.ranges = ranges
    lists, pictures = docci_files()
    source = write_tree(tmp_path / "docci", lists)
    write_tar(tmp_path / "a.tar", pictures)
    write_zip(tmp_path / "a.zip", pictures)
    web.files = {name: (tmp_path / name).read_bytes() for name in ("a.tar", "a.zip")}
    web.troubles["a.tar"] = deque([ended(3000)] * 4)
    expected = {name.removeprefix("images/").removesuffix(".jpg"): data for name, data in pictures.items()}
    found = pairs(read_items("docci", source, web.url("a.tar")))
    assert {id: pair.image for id, pair in found.items()} == expected
    if ranges:
        found = pairs(read_items("docci", source, web.url("a.zip")))
        assert {id: pair.image for id, pair in found.items()} == expected
    else:
        with pytest.raises(OSError, match=r"a\.zip: its server gives no parts of files"):
            read_items("docci", source, web.url("a.zip"))


def test_pictures_of_a_web_folder_are_asked_for_by_name(web: WebServer, tmp_path: Path) -> None:
    pictures = {f"photos/sa_{number}.jpg": jpeg(number) for number in range(1, 60)}
    web.files = {f"set/{name}": data for name, data in pictures.items()}
    rows = [{"image": name, "caption": "x"} for name in pictures] + [{"image": "photos/none.jpg", "caption": "x"}]
    write_jsonl(tmp_path / "list.jsonl", rows)
    web.files["set/list.jsonl"] = (tmp_path / "list.jsonl").read_bytes()
    web.troubles["set/photos/sa_7.jpg"] = deque([answer(500), ended(10)])
    items = read_items("pairs", web.url("set/list.jsonl"))
    assert [pair.image for pair in pairs(items).values()] == list(pictures.values()), "in the order of the list"
    assert reasons(items) == {"photos/none": f"not at {web.url('set/photos/none.jpg')}"}
    web.troubles["set/photos/sa_9.jpg"] = deque([answer(403)])
    with pytest.raises(PermissionError, match=r"sa_9\.jpg answered 403 Forbidden: it asks for consent"):
        read_items("pairs", web.url("set/list.jsonl"))


def test_a_web_folder_that_shows_its_folders_and_one_that_does_not(web: WebServer, tmp_path: Path) -> None:
    lists, pictures = docci_files()
    source = publish(web, "docci", write_tree(tmp_path / "docci", {**lists, **pictures}))
    expected = {f"images/{id}.jpg": pair.image for id, pair in pairs(read_items("docci", source)).items()}
    assert expected == pictures
    web.folders = {"docci/images"}
    assert len(pairs(read_items("docci", source))) == len(pictures)
    # A store says "forbidden" for what is not there; the metadata need not be.
    web.troubles["docci/docci_metadata.jsonlines"] = deque([answer(403)])
    assert pairs(read_items("docci", source))["train_00000"].meta == {}


@pytest.mark.parametrize(
    ("status", "error"), [(401, PermissionError), (403, PermissionError), (404, FileNotFoundError)]
)
def test_refusals_name_address_status_and_next_step(web: WebServer, status: int, error, tmp_path: Path) -> None:
    web.files["list.jsonl"] = b""
    web.troubles["list.jsonl"] = deque([answer(status)] * 3)
    with pytest.raises(error, match=rf"list\.jsonl answered {status} .*: .*"):
        write_set("pairs", source=web.url("list.jsonl"), out=str(tmp_path / "out"))
    web.troubles["docci/docci_descriptions.jsonlines"] = deque([answer(status)] * 3)
    told = f"answered {status}" if status != 404 else "a web folder cannot be listed"
    with pytest.raises(ValueError, match=rf"holds no docci_descriptions\.jsonlines; .*{told}.* docci needs: "):
        write_set("docci", source=web.url("docci/"), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_web_folder_cannot_be_listed(web: WebServer, tmp_path: Path) -> None:
    source = publish(web, "urban1k", write_tree(tmp_path / "u", urban1k_files("")))
    with pytest.raises(ValueError, match=r"no caption/\*\.txt; .*a web folder cannot be listed.* urban1k needs:"):
        read_items("urban1k", source)
    with pytest.raises(ValueError, match=r"a web folder cannot be listed; state its files: .*parquet needs:"):
        read_items("parquet", source)
    with pytest.raises(ValueError, match=r"so \* finds nothing; use \{0000\.\.0063\}\. webdataset needs:"):
        read_items("webdataset", web.url("a/*.tar"))


# the official place ---------------------------------------------------------------------------------------------------


def test_docci_without_source_streams_from_its_official_place(
    web: WebServer, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setenv("PIPELINE_MIRROR", web.url("mirror"))
    folder = docci(tmp_path / "elsewhere")
    write_set("docci", source=str(folder), out="local")
    publish(web, "mirror/docci", folder)
    write_set("docci")
    assert content(tmp_path / "data" / "mds" / "docci") == content(tmp_path / "local")
    assert f"docci: reading from {web.url('mirror/docci/')}\n" in capsys.readouterr().err
    manifest = json.loads((tmp_path / "data" / "mds" / "docci" / "manifest.json").read_text())
    assert (manifest["request"]["source"], manifest["origin"]) == (None, {"url": web.url("mirror/docci/")})
    assert write_set("docci").already_there
    write_tree(tmp_path / "data" / "docci", {"docci_descriptions.jsonlines": b""})
    assert write_set("docci").already_there, "data that come to lie here are no other request"
    with pytest.raises(ValueError, match="the source is empty"):
        write_set("docci", out="new", images=web.url("mirror/docci/docci_images.tar.gz"))  # data/docci comes first


def test_urban1k_without_source_is_read_out_of_its_zip(web: WebServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setenv("PIPELINE_MIRROR", web.url("mirror/"))
    files = urban1k_files()
    web.files["mirror/urban1k/Urban1k.zip"] = write_zip(tmp_path / "u.zip", files).read_bytes()
    found = pairs(read_items("urban1k"))
    assert {id: pair.image for id, pair in found.items()} == {
        id: files[f"Urban1k/image/{id}.jpg"] for id in ("1", "2", "3", "10")
    }


# stores and receipts --------------------------------------------------------------------------------------------------


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
