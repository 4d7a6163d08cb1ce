"""The same set from a folder and from the web: the same shards, byte for byte."""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path

import pytest

from shards.folder import FolderStore
from shards.location import location
from shards.writer import write_set
from tests.shards.elsewhere import content, docci, publish
from tests.shards.http_server import WebServer, answer, cut, ended, stalled
from tests.shards.layouts import jpeg, write_jsonl, write_tar, write_tree, write_zip
from tests.shards.layouts_dense import docci_files, urban1k_files
from tests.shards.reading import pairs, read_items, reasons

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


def test_nobody_waits_for_pictures_that_are_not_wanted_any_more(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C, which is raised in the main thread alone, while others wait for the server."""
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "60")
    names = [f"{number:02}.jpg" for number in range(40)]
    web.files |= {f"set/{name}": b"x" for name in names}
    for name in names[1:]:
        web.troubles[f"set/{name}"] = deque([answer(503)])
    answers = FolderStore(location(web.url("set/"))).read_wanted(names)
    assert next(answers) == ("00.jpg", b"x")
    answers.close()  # type: ignore[attr-defined]
    asked = Counter(path for path, _ in web.requests)
    assert 0 < len(asked) < 20
    assert set(asked.values()) == {1}, "no pause was waited out for another try"


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
