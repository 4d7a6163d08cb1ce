"""GOAL's and StructXLIP's lists: tests, crops, training lists with segments and boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shards.layouts import UNICODE_CAPTION, as_container
from tests.shards.layouts_dense import goal_box, goal_test, goal_train, structxlip_test, structxlip_train
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption, picture

PHOTOS = {f"photos/sa_{number}.jpg": picture(number) for number in range(1, 7)}


def write_list(path: Path, rows: list[dict[str, Any]], bom: bool = False) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8-sig" if bom else "utf-8")
    return path


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_a_test_list_matches_by_as_much_of_the_path_as_agrees(kind: str, tmp_path: Path) -> None:
    source = write_list(tmp_path / "DCI_test.json", goal_test(), bom=True)
    found = pairs(read_items("goal-json", source, as_container(kind, tmp_path, PHOTOS)))
    assert {id: pair.captions for id, pair in found.items()} == {
        "sa_1": [caption(9)],
        "sa_2": [UNICODE_CAPTION],
        "sa_3": ["It appears to be nighttime.", caption(10)],
    }
    assert {pair.split for pair in found.values()} == {"test"}
    assert found["sa_2"].image == PHOTOS["photos/sa_2.jpg"]


def test_a_training_list_carries_segments_and_boxes(tmp_path: Path) -> None:
    source = write_list(tmp_path / "DCI_train.json", goal_train())
    items = read_items("goal-json", source, as_container("folder", tmp_path, PHOTOS))
    found = pairs(items)
    assert {id: pair.split for id, pair in found.items()} == {"sa_4": "train", "sa_5": "train"}
    assert found["sa_4"].meta["regions"] == [
        {"caption": "crop 1", "box": [0, 0, 32, 64], "similarity_score": 28.5}
        | {"file": "../pipline/segment/sa_4.jpg_results/sa_4_max_1.png"},
        {"caption": "crop 2", "box": [8, 8, 9, 9], "similarity_score": 28.5}
        | {"file": "../pipline/segment/sa_4.jpg_results/sa_4_max_2.png"},
    ]
    assert found["sa_5"].meta["regions"] == []
    assert reasons(items) == {"DCI_train.json, row 3": "'bbox_coordinates' is None, not a box with x1, y1, x2, y2"}


def test_train_and_test_lists_become_one_set(tmp_path: Path) -> None:
    lists = {"train": goal_train(), "test": goal_test()}
    paths = {split: str(write_list(tmp_path / f"{split}.json", rows)) for split, rows in lists.items()}
    images = as_container("zip", tmp_path, PHOTOS)
    found = pairs(read_items("goal-json", None, images, **paths))
    assert {id: pair.split for id, pair in found.items()} == {
        "sa_4": "train",
        "sa_5": "train",
        "sa_1": "test",
        "sa_2": "test",
        "sa_3": "test",
    }
    for source, options in ((tmp_path / "train.json", paths), (None, {})):
        with pytest.raises(ValueError, match="goal-json takes either SOURCE or lists by option"):
            read_items("goal-json", source, images, **options)
    with pytest.raises(ValueError, match=r"goal-json takes no list without IMAGES\. It needs: a list as SOURCE"):
        read_items("goal-json", tmp_path / "test.json")
    with pytest.raises(FileNotFoundError, match=r"is not a file\. goal-json needs:"):
        read_items("goal-json", tmp_path, images)


def test_crops_and_pictures_of_equal_names(tmp_path: Path) -> None:
    crops = [
        {
            "filename": f"../{folder}/x_max_1.png",
            "caption": folder,
            "similarity_score": 9.5,
            "bbox_coordinates": goal_box(1, 2, 3, 4),
        }
        for folder in ("a", "b")
    ]
    source = write_list(tmp_path / "crops.json", crops)
    images = as_container("folder", tmp_path, {"a/x_max_1.png": picture(1, "LA"), "b/x_max_1.png": picture(2, "P")})
    items = read_items("goal-json", source, images)
    assert reasons(items)["crops.json, row 2"].startswith("id 'x_max_1' already stands for '../a/x_max_1.png'")
    by_path = pairs(read_items("goal-json", source, images, id="path"))
    assert {id: (pair.meta["box"], pair.image) for id, pair in by_path.items()} == {
        "a/x_max_1": ([1, 2, 3, 4], picture(1, "LA")),
        "b/x_max_1": ([1, 2, 3, 4], picture(2, "P")),
    }


def test_structxlip_matches_the_packaged_file_and_keeps_structure_pictures(tmp_path: Path) -> None:
    source = write_list(tmp_path / "Sketchy.json", structxlip_test())
    images = as_container(
        "zip", tmp_path / "a", {"LOST/test/global/1.jpg": picture(1), "OtherDatasets/2.jpg": picture(2)}
    )
    found = pairs(read_items("structxlip-json", source, images))
    assert {id: (pair.captions, pair.image) for id, pair in found.items()} == {
        "1": ([caption(13)], picture(1)),
        "2": ([caption(14)], picture(2)),
    }
    train = write_list(tmp_path / "train.json", structxlip_train())
    (pair,) = pairs(read_items("structxlip-json", train, as_container("tar", tmp_path, PHOTOS))).values()
    assert pair.meta["original_filename_structure"] == "/home/a/canny/sa_4.png"
    assert pair.meta["regions"][0]["filename_structure_cropped"] == "/home/a/canny/sa_4_max_1.png"


def test_a_missing_picture_is_missing_and_not_black(tmp_path: Path) -> None:
    source = write_list(tmp_path / "list.json", structxlip_test())
    items = read_items("structxlip-json", source, as_container("folder", tmp_path, {"OtherDatasets/2.jpg": picture(2)}))
    assert set(pairs(items)) == {"2"}
    assert "not in" in reasons(items)["1"]
