"""COCO and Flickr30k, by Karpathy's lists and by their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shards.layouts import write_tar, write_tree, write_zip
from tests.shards.layouts_more import coco_files, five, flickr_files
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import picture


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    lists, pictures = coco_files()
    return write_tree(tmp_path / "coco", lists | pictures)


def test_coco_by_karpathy(coco: Path) -> None:
    items = read_items("coco", coco)
    found = pairs(items)
    assert {id: (pair.split, len(pair.captions)) for id, pair in found.items()} == {
        "42": ("test", 6),
        "73": ("restval", 5),
        "9": ("train", 5),
    }
    assert found["42"].captions == five("A cat", 6)
    assert found["42"].image == picture(2)
    assert reasons(items) == {"image 4": "'split' is 'dev', not one of train, restval, val, test"}
    joined = pairs(read_items("coco", coco, splits="train,restval", restval="train", captions="5"))
    assert {id: pair.split for id, pair in joined.items()} == {"73": "train", "9": "train"}
    assert len(pairs(read_items("coco", coco, captions="5"))["42"].captions) == 5


def test_coco_by_its_own_list_and_zips(coco: Path, tmp_path: Path) -> None:
    lists, pictures = coco_files()
    zipped = tmp_path / "zips"
    zipped.mkdir()
    write_zip(zipped / "annotations_trainval2017.zip", lists)
    for folder in ("train2017", "val2017"):
        write_zip(zipped / f"{folder}.zip", {name: data for name, data in pictures.items() if name.startswith(folder)})
    for source in (coco, zipped):
        items = read_items("coco", source, list="coco")
        found = pairs(items)
        assert {id: (pair.split, pair.captions) for id, pair in found.items()} == {
            "9": ("train", ["A bus."]),
            "139": ("val", ["A room."]),
            "320612": ("val", ["A photo\nwith a line end", "Another. "]),
        }
        assert found["320612"].image == picture(2, "RGBA"), "a PNG called .jpg stays what it is"
        assert reasons(items) == {
            "image 4": "annotation: no 'image_id' among id, caption",
            "image 5": "annotation: not a JSON object but NoneType",
        }
    assert set(pairs(read_items("coco", coco, list="coco", splits="val"))) == {"139", "320612"}
    with pytest.raises(ValueError, match=r"holds no captions_train2014\.json; it holds"):
        read_items("coco", coco, list="coco", year="2014")
    with pytest.raises(ValueError, match="own lists have captions of train and val only"):
        read_items("coco", coco, list="coco", splits="test")


def test_a_list_of_another_kind_is_named(coco: Path, tmp_path: Path) -> None:
    other = write_tree(tmp_path / "x", {"val2017/1.jpg": b"", "captions_val2017.json": b"[]"})
    with pytest.raises(ValueError, match=r"captions_val2017\.json holds a JSON list, not an object with images, annot"):
        read_items("coco", other, list="coco", splits="val")
    (coco / "dataset_coco.json").write_text('{"annotations": []}')
    with pytest.raises(ValueError, match=r"dataset_coco\.json has no 'images'; it has annotations"):
        read_items("coco", coco)
    (coco / "dataset_coco.json").write_text('{"images": {}}')
    with pytest.raises(ValueError, match=r"dataset_coco\.json holds a JSON dict, not an array of objects"):
        read_items("coco", coco)
    (coco / "dataset_coco.json").write_text('{"images": [7, {"split": "val", "sentences": "none"}]}')
    found = reasons(read_items("coco", coco))
    assert found["image 1"] == "not a JSON object but int"
    assert found["image 2"] == "no 'cocoid' among split, sentences"
    (coco / "dataset_coco.json").write_text('{"images": [')
    with pytest.raises(ValueError, match=r"dataset_coco\.json is not JSON"):
        read_items("coco", coco)


@pytest.mark.parametrize("kind", ["folder", "tar.gz"])
def test_flickr30k(kind: str, tmp_path: Path) -> None:
    lists, pictures = flickr_files()
    source = write_tree(tmp_path / "flickr", lists)
    if kind == "folder":
        write_tree(source, pictures)
    else:
        write_tar(source / "flickr30k-images.tar.gz", pictures, "w:gz")
    found = pairs(read_items("flickr30k", source))
    assert {id: pair.split for id, pair in found.items()} == {
        "1000092795": "train",
        "10002456": "val",
        "1000268201": "test",
    }
    assert found["10002456"].captions == five("A boy")
    assert found["10002456"].image == picture(1)
    own = read_items("flickr30k", source, list="token")
    assert {id: (pair.split, pair.captions) for id, pair in pairs(own).items()} == {
        "1000092795": ("test", five("train")),
        "10002456": ("test", five("val")),
        "1000268201": ("test", five("test")),
    }
    assert reasons(own) == {"line 4": "no tab between picture and caption: 'a line without a tab'"}
    (source / "results_20130124.token").write_bytes("1.jpg#0\tcaf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"results_20130124\.token is not UTF-8"):
        read_items("flickr30k", source, list="token")
