"""DOCCI in its official layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.pair import Missing
from tests.shards.layouts import UNICODE_CAPTION, write_tar, write_tree
from tests.shards.layouts_dense import docci_aar_files, docci_files, lines
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption

EVERYTHING = {
    "train_00000": "train",
    "train_00001": "train",
    "test_00000": "test",
    "test_00001": "test",
    "qual_dev_00000": "qual_dev",
    "qual_test_00000": "qual_test",
}


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "docci", docci_files()[0])


@pytest.mark.parametrize("kind", ["unpacked", "tar", "images", "list"])
def test_pairs_of_each_layout(kind: str, lists: Path, tmp_path: Path) -> None:
    pictures = docci_files()[1]
    source, images = lists, None
    if kind == "unpacked":
        write_tree(lists, pictures)
    elif kind == "images":
        images = write_tar(tmp_path / "elsewhere.tar.gz", pictures, "w:gz")
    else:
        write_tar(lists / "docci_images.tar.gz", pictures, "w:gz")
        source = lists if kind == "tar" else lists / "docci_descriptions.jsonlines"
    found = pairs(read_items("docci", source, images))
    assert {id: pair.split for id, pair in found.items()} == EVERYTHING
    assert all(pair.image == pictures[f"images/{id}.jpg"] for id, pair in found.items())
    assert found["train_00001"].captions == [UNICODE_CAPTION]
    assert found["test_00001"].captions == [caption(1).upper()]


def test_extras_travel_and_are_not_needed(lists: Path) -> None:
    write_tree(lists, docci_files()[1])
    found = pairs(read_items("docci", lists))
    assert found["train_00000"].meta == {"cluster_id": 7, "entity_tags": ["dog"]}
    assert found["test_00000"].meta["distractors"][0] == "test_00001.jpg"
    assert found["qual_dev_00000"].meta == {}
    (lists / "docci_metadata.jsonlines").unlink()
    assert pairs(read_items("docci", lists))["train_00000"].meta == {}


def test_chosen_splits_and_the_5100(lists: Path) -> None:
    write_tree(lists, docci_files()[1])
    assert set(pairs(read_items("docci", lists, splits="qual_dev"))) == {"qual_dev_00000"}
    both = pairs(read_items("docci", lists, splits="test5100,train"))
    assert {id: pair.split for id, pair in both.items()} == {
        "train_00000": "train",
        "train_00001": "train",
        "test_00000": "test5100",
        "test_00001": "test5100",
        "qual_test_00000": "test5100",
    }
    with pytest.raises(ValueError, match="test5100 holds the pictures of test too"):
        read_items("docci", lists, splits="test5100,test")
    with pytest.raises(ValueError, match="splits is some of train, test, qual_dev, qual_test, test5100, not 'val'"):
        read_items("docci", lists, splits="train,val")


def test_rows_that_cannot_be_pairs(lists: Path) -> None:
    write_tree(lists, docci_files()[1])
    good = {"example_id": "train_00000", "split": "train", "image_file": "train_00000.jpg", "description": "good"}
    rows = [
        good,
        {**good, "example_id": "a", "description": None},  # counted by the writer
        {**good, "example_id": "b", "split": "dev"},
        {key: value for key, value in good.items() if key != "image_file"} | {"example_id": "c"},
        {**good, "image_file": "train_00001.jpg"},
    ]
    (lists / "docci_descriptions.jsonlines").write_bytes(b"\xef\xbb\xbf" + lines(rows))
    items = read_items("docci", lists)
    assert {id: pair.captions for id, pair in pairs(items).items()} == {"train_00000": ["good"], "a": [""]}
    assert reasons(items) == {
        "line 3": "'split' is 'dev', not one of train, test, qual_dev, qual_test",
        "line 4": "no 'image_file' among example_id, split, description",
        "line 5": "id 'train_00000' already stands for 'images/train_00000.jpg', here for 'images/train_00001.jpg'",
    }


def test_wrong_files_are_told_apart(lists: Path, tmp_path: Path) -> None:
    aar = write_tar(tmp_path / "docci_images_aar.tar.gz", docci_aar_files(), "w:gz")
    with pytest.raises(
        ValueError, match=r"holds no docci_descriptions\.jsonlines; it holds images_aar/aar_test_04600\.jpg"
    ):
        read_items("docci", aar)
    missing = read_items("docci", lists, aar)
    assert all(isinstance(item, Missing) for item in missing)
    assert "which holds 3 files: images_aar/aar_test_04600.jpg" in reasons(missing)["train_00000"]
    with pytest.raises(
        FileNotFoundError, match=r"pictures of docci are not in .*expected images or docci_images\.tar\.gz"
    ):
        read_items("docci", lists)
    metadata = read_items("docci", lists / "docci_metadata.jsonlines", aar)
    assert reasons(metadata)["line 1"].startswith("no 'split' among example_id, cluster_id")
    write_tree(lists, {"old/docci_descriptions.jsonlines": b""})
    with pytest.raises(
        ValueError, match=r"holds 2 files docci_descriptions\.jsonlines \(.*point SOURCE at the one meant"
    ):
        read_items("docci", lists, aar)
