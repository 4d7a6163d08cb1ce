"""DCI in its official layout: folder, parent folder, archive; photographs beside it or in SA-1B's tar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shards.pair import Item, Missing, Pair, Rejected
from shards.writer import write_set
from tests.shards.layouts import UNICODE_CAPTION, dci_files, write_tar, write_tree
from tests.shards.reading import read_items


def read(source: Path | None, images: Path | None = None, caption: str = "extra", **options: str) -> dict[str, Item]:
    return {item.id: item for item in read_items("dci", source, images, caption=caption, **options)}


@pytest.fixture
def sa1b(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "sa_000138.tar", dci_files()[1])


@pytest.mark.parametrize("kind", ["folder", "parent", "archive", "download"])
def test_pairs_of_each_layout(kind: str, tmp_path: Path, sa1b: Path) -> None:
    annotations, photos = dci_files()
    if kind in ("archive", "download"):
        source = write_tar(tmp_path / "dci.tar.gz", annotations, "w:gz")
        source = source if kind == "archive" else tmp_path
    else:
        source = write_tree(tmp_path / "dci", annotations)
        source = source if kind == "parent" else source / "densely_captioned_images"
    items = read(source, sa1b)
    pairs = {id: item for id, item in items.items() if isinstance(item, Pair)}
    assert {id: pair.split for id, pair in pairs.items()} == {
        "sa_1545001": "train",
        "sa_1545002": "val",
        "sa_1545004": "test",
        "sa_1545005": "unlisted",
    }
    assert all(pair.image == photos[f"./{id}.jpg"] for id, pair in pairs.items())
    assert pairs["sa_1545002"].captions == [UNICODE_CAPTION]
    assert items["sa_1545003"] == Rejected("sa_1545003", "empty extra caption in 102-data.json", "train")


def test_photographs_in_photos(tmp_path: Path) -> None:
    annotations, photos = dci_files()
    source = write_tree(tmp_path / "dci", annotations)
    write_tree(source / "densely_captioned_images" / "photos", {"sa_1545001.jpg": photos["./sa_1545001.jpg"]})
    items = read(source)
    assert isinstance(items["sa_1545001"], Pair)
    missing = items["sa_1545002"]
    assert isinstance(missing, Missing)
    assert (missing.image_name, missing.split) == ("sa_1545002.jpg", "val")


def test_caption_variants(tmp_path: Path, sa1b: Path) -> None:
    source = write_tree(tmp_path / "dci", dci_files()[0])
    expected = {
        "short": "A park.",
        "extra": "A wide park with two benches.",
        "extended": "A park.\nA wide park with two benches.",
        "full": "A park.\nA wide park with two benches.\nThe following can also be seen in the image:\n"
        "tree: a tall green tree\nbench\ndog: a dog asleep",
    }
    for kind, caption in expected.items():
        item = read(source, sa1b, kind)["sa_1545001"]
        assert isinstance(item, Pair)
        assert item.captions == [caption]
    dog = read(source, sa1b, "extended")["sa_1545003"]
    assert isinstance(dog, Pair)
    assert dog.captions == ["A dog."], "an empty extra caption leaves no trailing line"


def test_regions_accept_both_forms_of_bounds(tmp_path: Path, sa1b: Path) -> None:
    item = read(write_tree(tmp_path / "dci", dci_files()[0]), sa1b)["sa_1545001"]
    assert isinstance(item, Pair)
    assert item.meta == {
        "annotation": "100-data.json",
        "regions": [
            {"caption": "tree: a tall green tree", "box": [10, 20, 300, 400]},
            {"caption": "dog: a dog asleep", "box": [5, 6, 70, 80]},
        ],
    }


def test_broken_and_absent_annotations_are_rejected(tmp_path: Path, sa1b: Path) -> None:
    annotations, _ = dci_files()
    annotations["densely_captioned_images/annotations/101-data.json"] = b'{"image": "sa_15'
    del annotations["densely_captioned_images/annotations/103-data.json"]
    items = read(write_tree(tmp_path / "dci", annotations), sa1b)
    broken, absent = items["101-data.json"], items["103-data.json"]
    assert isinstance(broken, Rejected)
    assert "cannot be read" in broken.reason
    assert absent == Rejected("103-data.json", "in the splits, but not in annotations/", "test")


def test_what_is_not_there_is_asked_for(tmp_path: Path, sa1b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "drive"))
    with pytest.raises(FileNotFoundError, match=r"data/dci and .*drive/dci not found\. dci needs: dci\.tar\.gz"):
        read(None)
    annotations, _ = dci_files()
    write_tree(tmp_path / "drive" / "dci", annotations)
    assert "sa_1545001" in read(None, sa1b)
    with pytest.raises(FileNotFoundError, match=r"pictures of dci are not in .*sa_000138\.tar"):
        read(None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no annotations/\*\.json"):
        read(tmp_path / "empty", sa1b)
    del annotations["densely_captioned_images/splits.json"]
    with pytest.raises(ValueError, match=r"no splits\.json"):
        read(write_tree(tmp_path / "unsplit", annotations), sa1b)


def goal_lists(folder: Path) -> dict[str, str]:
    """A list of crops for training and a list of pictures for the test, as GOAL has them."""
    train = [
        {"filename": f"../seg/sa_154500{n}.jpg_results/sa_154500{n}_max_3.png", "caption": "crop"} for n in (1, 4, 9)
    ]
    test = [{"filename": "../DCI/photos/sa_1545002.jpg", "caption": "whole"}]
    paths = {}
    for split, rows in {"train": train, "test": test}.items():
        path = folder / f"DCI_{split}.json"
        path.write_text(json.dumps(rows))
        paths[f"goal_{split}"] = str(path)
    return paths


def test_splits_of_goal(tmp_path: Path, sa1b: Path) -> None:
    source = write_tree(tmp_path / "dci", dci_files()[0])
    items = read(source, sa1b, **goal_lists(tmp_path))
    splits = {id: item.split for id, item in items.items() if isinstance(item, Pair)}
    assert splits == {"sa_1545001": "train", "sa_1545004": "train", "sa_1545002": "test"}, "and no other photograph"
    assert items["sa_1545009"] == Rejected("sa_1545009", "in the splits, but not in annotations/", "train")
    lists = goal_lists(tmp_path)
    with pytest.raises(ValueError, match="sa_1545002 is in GOAL's list of train and in that of test"):
        read(source, sa1b, goal_train=lists["goal_test"], goal_test=lists["goal_test"])
    (tmp_path / "DCI_test.json").write_text('[{"filename": "Urban1k/image/1.jpg"}]')
    with pytest.raises(ValueError, match=r"DCI_test\.json, row 1: 'Urban1k/image/1\.jpg' names no photograph of SA-1B"):
        read(source, sa1b, **lists)


def test_an_edited_list_is_another_request(tmp_path: Path, sa1b: Path) -> None:
    source = write_tree(tmp_path / "dci", dci_files()[0])
    arguments: dict[str, Any] = {"source": str(source), "images": str(sa1b), "out": str(tmp_path / "out")}
    lists = goal_lists(tmp_path)
    assert write_set("dci", options=lists, **arguments).written == {"train": 2, "test": 1}
    assert write_set("dci", options=lists, **arguments).already_there
    (tmp_path / "DCI_test.json").write_text('[{"filename": "sa_1545005.jpg"}]')
    with pytest.raises(ValueError, match=r"another request \(goal_test '.*DCI_test\.json' has changed since\)"):
        write_set("dci", options=lists, **arguments)


def test_long_dci_is_every_photograph_with_an_extra_caption(tmp_path: Path, sa1b: Path) -> None:
    source = write_tree(tmp_path / "dci", dci_files()[0])
    items = {item.id: item for item in read_items("long-dci", source, sa1b)}
    pairs = {id: item for id, item in items.items() if isinstance(item, Pair)}
    assert {id: pair.split for id, pair in pairs.items()} == dict.fromkeys(
        ("sa_1545001", "sa_1545002", "sa_1545004", "sa_1545005"), "test"
    )
    assert pairs["sa_1545002"].captions == [UNICODE_CAPTION]
    assert items["sa_1545003"] == Rejected("sa_1545003", "empty extra caption in 102-data.json", "test")
    unseen = read_items("long-dci", source, sa1b, without_dci_train="yes")
    assert {item.id for item in unseen} == {"sa_1545002", "sa_1545004", "sa_1545005"}
