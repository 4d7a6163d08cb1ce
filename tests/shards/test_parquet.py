"""Pairs in Parquet files, written by pyarrow as the datasets library does."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from shards.pair import Pair
from tests.shards.http_server import cut, ended, serving
from tests.shards.layouts import UNICODE_CAPTION
from tests.shards.layouts_tables import HF_IMAGE, hf_file, write_parquet
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption, picture


def test_image_structs_and_splits_by_file_name(tmp_path: Path) -> None:
    hf_file(tmp_path / "data" / "train-00000-of-00002.parquet", range(3))
    hf_file(tmp_path / "data" / "train-00001-of-00002.parquet", range(3, 5))
    hf_file(tmp_path / "data" / "validation-00000-of-00001.parquet", range(5, 7), [["a", "b"], [UNICODE_CAPTION]])
    items = read_items("parquet", tmp_path)
    assert [item.id for item in items] == [f"{number:05}" for number in range(7)]
    found = pairs(items)
    assert all(pair.image == picture(int(id)) for id, pair in found.items())
    assert found["00002"] == Pair("00002", picture(2), [caption(2)], "train", {"image": "00002.jpg"})
    assert [found[id].captions for id in ("00005", "00006")] == [["a", "b"], [UNICODE_CAPTION]]
    assert [pair.split for pair in found.values()] == ["train"] * 5 + ["val"] * 2
    assert read_items("parquet", str(tmp_path / "data/train-*.parquet")) == items[:5]
    assert read_items("parquet", str(tmp_path / "data/train-{00000..00001}-of-00002.parquet")) == items[:5]
    assert read_items("parquet", str(tmp_path / "data/train-{00001,00000}-of-00002.parquet")) == items[3:5] + items[:3]


def test_raw_bytes_several_captions_and_columns_that_are_stated(tmp_path: Path) -> None:
    columns = {
        "picture": pa.array([picture(n) for n in range(3)], pa.large_binary()),
        "mask": pa.array([b"m"] * 3),
        "short": pa.array(["s0", None, "s2"]),
        "long": pa.array([["l0"], ["l1", None], None], pa.large_list(pa.large_string())),
        "uid": pa.array([70, 71, 72]),
        "fold": pa.array(["train", "test", None]).dictionary_encode(),
    }
    path = write_parquet(tmp_path / "set.parquet", columns)
    with pytest.raises(ValueError, match=r"set\.parquet: captions may be in short or long or fold: state caption_key"):
        read_items("parquet", path)
    items = read_items("parquet", path, caption_key="short, long", id_key="uid", split_key="fold")
    assert items == [
        Pair("70", picture(0), ["s0", "l0"], "train", {}),
        Pair("71", picture(1), ["", "l1", ""], "test", {}),
        Pair("72", picture(2), ["s2", ""], "train", {}),
    ]
    by_row = read_items("parquet", path, caption_key="long", split="val")
    assert [(item.id, item.split) for item in by_row] == [(f"set/{n}", "val") for n in (1, 2, 3)]
    for options, said in (
        ({"image_key": "short"}, r"pictures are not in column 'short'; columns of that kind: picture, mask"),
        ({"image_key": "none"}, r"set\.parquet has no column 'none'; it has picture, mask, short, long, uid, fold"),
        ({"caption_key": "long,x"}, r"has no column 'x'"),
    ):
        with pytest.raises(ValueError, match=said):
            read_items("parquet", path, **{"caption_key": "long", **options})


def test_rows_that_cannot_be_pairs(tmp_path: Path) -> None:
    images = [None, {"bytes": None, "path": "/far/1.jpg"}, {"bytes": b"j", "path": None}, {"bytes": b"j", "path": "/"}]
    schema = pa.schema([("image", HF_IMAGE), ("text", pa.string())])
    path = write_parquet(tmp_path / "test.parquet", {"image": images, "text": ["x"] * 4}, schema)
    items = read_items("parquet", path)
    assert pairs(items) == {"test/3": Pair("test/3", b"j", ["x"], "test", {})}
    assert reasons(items) == {
        "test.parquet, row 1": "'image' holds no bytes",
        "test.parquet, row 2": "'image' holds no bytes; its file '/far/1.jpg' is not in the Parquet file",
        "test.parquet, row 4": "'/' is not the path of a file",
    }


def test_captions_that_are_no_text_are_not_taken_for_captions(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"image": [b"j"], "caption": [7]})
    with pytest.raises(ValueError, match="captions may be in no column that is there: state caption_key"):
        read_items("parquet", path)
    items = read_items("parquet", path, caption_key="caption")
    assert reasons(items) == {"x.parquet, row 1": "'caption' holds int, not text"}
    path = write_parquet(tmp_path / "y.parquet", {"words": ["w"], "photo": [b"j"]})
    (pair,) = read_items("parquet", path)
    assert isinstance(pair, Pair)
    assert (pair.image, pair.captions) == (b"j", ["w"]), "the only columns of their kind"


def test_files_from_the_web_and_from_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "0.001")
    names = [f"train-0000{n}-of-00002.parquet" for n in range(2)]
    store = fsspec.filesystem("memory")
    with serving() as web:
        for n, name in enumerate(names):
            data = hf_file(tmp_path / name, range(4 * n, 4 * n + 4)).read_bytes()
            web.files[f"set/{name}"] = data
            web.troubles[f"set/{name}"] = deque([ended(0), cut(1000), ended(3000)])
            store.pipe(f"/parquet-test/{name}", data)
        expected = read_items("parquet", tmp_path)
        assert len(pairs(expected)) == 8
        assert read_items("parquet", web.url("set/train-{00000..00001}-of-00002.parquet")) == expected
        web.ranges = False
        with pytest.raises(OSError, match=r"its server gives no parts of files, which a zip or Parquet file needs"):
            read_items("parquet", web.url(f"set/{names[0]}"))
    try:
        for url in ("memory://parquet-test", "memory://parquet-test/train-*.parquet"):
            assert read_items("parquet", url) == expected
    finally:
        store.rm("/parquet-test", recursive=True)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = hf_file(tmp_path / "x.parquet", range(4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"x\.parquet is damaged, incomplete or not Parquet"):
        read_items("parquet", path)
    path.write_bytes(b"PAR1" + bytes(3000) + whole[3004:])
    with pytest.raises(ValueError, match=r"x\.parquet is damaged"):
        read_items("parquet", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.parquet files\. parquet needs:"):
        read_items("parquet", tmp_path / "empty")
