from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from export.runtime import Bundle
from export.serving.index import build_index, load_index
from export.serving.search import SearchIndex, search
from export.serving.sheet import write_sheet
from shards.reader import ShardReader

QUERY = "a dog beside a red car"


@pytest.fixture(scope="module")
def root(tiny_bundle: Path, split: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle and an index of the split beside it."""
    root = tmp_path_factory.mktemp("serving")
    shutil.copytree(tiny_bundle, root / "bundle")
    done: list[int] = []
    report = build_index(root / "bundle", split, root / "index", batch_size=32, progress=done.append)
    assert (report.count, report.dim) == (80, 48)
    assert done == [32, 64, 80]
    return root


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy"


def test_an_index_holds_every_picture(root: Path, reader: ShardReader) -> None:
    assert sorted(os.listdir(root)) == ["bundle", "index"]
    index = SearchIndex(root / "index")
    expected = Bundle(root / "bundle").encode_images([reader[i]["image"] for i in range(len(reader))])
    np.testing.assert_allclose(index.embeddings, expected, atol=1e-5)
    hits = {hit.id: hit for hit in index.search(QUERY, top=1000)}
    assert [hit.rank for hit in hits.values()] == list(range(1, 81))
    for i in range(len(reader)):
        hit = hits[reader[i]["id"]]
        assert hit.caption == reader[i]["captions"][0]
        thumbnail = np.asarray(Image.open(io.BytesIO(hit.thumbnail)).convert("RGB").resize((32, 32)), np.float32)
        picture = np.asarray(Image.open(io.BytesIO(reader[i]["image"])).convert("RGB").resize((32, 32)), np.float32)
        assert np.abs(thumbnail - picture).mean() < 6


def test_the_nearest_picture_comes_first(copy: Path, reader: ShardReader) -> None:
    embeddings = np.load(copy / "index" / "embeddings.npy")
    embeddings[37] = Bundle(copy / "bundle").encode_texts([QUERY])[0]
    np.save(copy / "index" / "embeddings.npy", embeddings)
    hits = search(copy / "index", QUERY, top=3)
    assert [hit.rank for hit in hits] == [1, 2, 3]
    assert hits[0].id == reader[37]["id"]
    assert hits[0].score == pytest.approx(1, abs=1e-5)
    assert hits[0].score > hits[1].score >= hits[2].score


def test_both_may_move_together(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy / "index")
    assert len(search(".", QUERY)) == 5


def test_a_bundle_that_moved_alone(copy: Path) -> None:
    (copy / "bundle").rename(copy / "renamed")
    with pytest.raises(FileNotFoundError, match=r"is not at .*bundle; say where it is"):
        search(copy / "index", QUERY)
    assert len(search(copy / "index", QUERY, bundle_path=copy / "renamed")) == 5


def test_another_bundle_is_refused(copy: Path, lite0_bundle: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the bundle that embedded .* build the index again: pipeline index"):
        search(copy / "index", QUERY, bundle_path=lite0_bundle)
    manifest = json.loads((copy / "bundle" / "manifest.json").read_text())
    (copy / "bundle" / "manifest.json").write_text(json.dumps({**manifest, "source": {"step": 24}}))
    with pytest.raises(ValueError, match="is not the bundle that embedded"):
        search(copy / "index", QUERY)


def test_a_damaged_index_is_refused(copy: Path) -> None:
    items = copy / "index" / "items.jsonl"
    items.write_text("".join(items.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"index .* is damaged: its files disagree"):
        search(copy / "index", QUERY)
    (copy / "index" / "embeddings.npy").unlink()
    with pytest.raises(ValueError, match=r"index .* is damaged"):
        search(copy / "index", QUERY)


def test_what_is_no_index(tmp_path: Path, root: Path, split: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder; build one: pipeline index"):
        load_index(tmp_path / "absent")
    with pytest.raises(ValueError, match="is not an index"):
        load_index(root / "bundle")
    with pytest.raises(ValueError, match="is not an index, so it is not replaced"):
        build_index(root / "bundle", split, root / "bundle")


def test_a_failure_leaves_nothing(root: Path, split: Path, tmp_path: Path) -> None:
    shutil.copytree(split, tmp_path / "broken")
    shard = next((tmp_path / "broken").glob("*.mds*"))
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"\x89PNG", b"\x89PNX"))
    with pytest.raises(ValueError, match="pipeline shards verify"):
        build_index(root / "bundle", tmp_path / "broken", tmp_path / "index")
    assert os.listdir(tmp_path) == ["broken"]


@pytest.mark.parametrize(("query", "top", "message"), [(" ", 5, "the query is empty"), ("dog", 0, "at least one")])
def test_a_senseless_query(root: Path, query: str, top: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(root / "index", query, top)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_sheet_needs_nothing_else_and_escapes_all(root: Path, tmp_path: Path) -> None:
    hits = search(root / "index", QUERY, top=80)
    assert any("<script>" in hit.caption for hit in hits)
    hits[0] = replace(hits[0], id='"><img src=x onerror=alert(1)>')
    write_sheet(hits, "</title><script>alert(2)</script>", tmp_path / "sheet.html")
    page = _Tags()
    page.feed((tmp_path / "sheet.html").read_text(encoding="utf-8"))
    names = [name for name, _ in page.tags]
    assert "script" not in names
    assert names.count("img") == 80
    for _, attributes in page.tags:
        assert not set(attributes) & {"onerror", "href"}
        assert attributes.get("src", "data:").startswith("data:")  # type: ignore[union-attr]
    assert "url(" not in page.text
    assert "</title><script>alert(2)</script>" in page.text
    assert hits[3].caption in page.text
