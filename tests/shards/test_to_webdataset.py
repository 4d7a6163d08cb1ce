"""Shards back to WebDataset tars: read by the webdataset library itself, the bytes are those of the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shards.reader import ShardReader
from shards.to_webdataset import to_webdataset
from tests.shards.conftest import Write, row
from tests.shards.layouts import UNICODE_CAPTION, encoded, jpeg
from tests.shards.resume import leftovers, tree


def read_tars(folder: Path, split: str) -> list[dict[str, Any]]:
    import webdataset

    urls = [str(path) for path in sorted(folder.glob(f"{split}-*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


FILES = {"a.b/c.jpg": jpeg(1), "d%.jpg": encoded(Image.new("RGBA", (8, 8), (9, 8, 7, 99)), "PNG"), "é.webp": b""}


@pytest.fixture
def written(write: Write, tmp_path: Path) -> Path:
    files = FILES | {"é.webp": encoded(Image.new("RGB", (9, 9)), "WEBP"), "v.jpg": jpeg(7)}
    rows = [row(name, [UNICODE_CAPTION, "second"], place="x") for name in files if name != "v.jpg"]
    write([*rows, row("v.jpg", split="val")], files)
    return tmp_path / "out"


def test_round_trip(written: Path, tmp_path: Path) -> None:
    assert to_webdataset(written, tmp_path / "tars") == {"train": 3, "val": 1}
    found = read_tars(tmp_path / "tars", "train")
    assert [sample["__key__"] for sample in found] == ["a%2Eb%2Fc", "d%25", "é"]
    reader = ShardReader(written / "train")
    for sample, extension, index in zip(found, ("jpg", "png", "webp"), range(3), strict=True):
        pair = reader[index]
        assert sample[extension] == pair["image"]
        assert sample["txt"].decode() == UNICODE_CAPTION
        facts = json.loads(sample["json"])
        assert facts == {"id": pair["id"], "captions": [UNICODE_CAPTION, "second"], "meta": pair["meta"]}
    assert len(read_tars(tmp_path / "tars", "val")) == 1
    assert leftovers(tmp_path / "tars") == []


def test_several_tars_and_the_same_bytes_each_time(written: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        to_webdataset(written, tmp_path / name, tar_size=1e-6)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert sorted(tree(tmp_path / "one"))[:2] == ["train-000000.tar", "train-000001.tar"]
    assert len(read_tars(tmp_path / "one", "train")) == 3


def test_back_to_the_same_set(written: Path, tmp_path: Path) -> None:
    """Through our own source of WebDataset tars: ids, captions and pictures as they were."""
    from shards.writer import write_set

    to_webdataset(written, tmp_path / "tars")
    write_set("webdataset", source=str(tmp_path / "tars"), out=str(tmp_path / "back"))
    for split in ("train", "val"):
        before, after = ShardReader(written / split), ShardReader(tmp_path / "back" / split)
        assert [after[index] for index in range(len(after))] == [before[index] for index in range(len(before))]


def test_a_folder_with_something_in_it_is_left_alone(written: Path, tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="is there and not empty"):
        to_webdataset(written, tmp_path / "tars")
    with pytest.raises(ValueError, match=r"holds no manifest\.json"):
        to_webdataset(tmp_path / "tars", tmp_path / "more")
