"""Visual Genome paragraphs: two folders or two zips of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shards.layouts import write_tree, write_zip
from tests.shards.layouts_dense import vg_files
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption


@pytest.mark.parametrize("kind", ["folders", "zips", "elsewhere", "mixed"])
def test_pairs_of_each_layout(kind: str, tmp_path: Path) -> None:
    lists, pictures = vg_files()
    source = write_tree(tmp_path / "vg", lists)
    first = {name: data for name, data in pictures.items() if name.startswith("VG_100K/")}
    second = {name: data for name, data in pictures.items() if name not in first}
    base = source if kind != "elsewhere" else tmp_path / "pictures"
    write_tree(base, first if kind == "mixed" else {} if kind == "zips" else pictures)
    if kind == "zips":
        write_zip(base / "images.zip", first)
    if kind in ("zips", "mixed"):
        write_zip(base / "images2.zip", second)
    items = read_items("vg-paragraphs", source, base if kind == "elsewhere" else None)
    found = pairs(items)
    assert {id: pair.split for id, pair in found.items()} == {
        "10": "train",
        "2388350": "test",
        "12": "unlisted",
        "13": "val",
        "14": "train",
    }
    assert found["10"].captions == [caption(5), caption(6)]
    assert found["2388350"].captions == [" A leading  and a double space."]
    assert found["2388350"].meta == {"image": "VG_100K_2/2388350.jpg"}
    assert found["14"].captions == [" \n"], "the writer counts it"
    assert all(
        pair.image == pictures[f"VG_100K{'_2' * (id in ('12', '2388350'))}/{id}.jpg"] for id, pair in found.items()
    )
    assert reasons(items) == {"row 7": "no 'paragraph' among url, image_id"}


def test_chosen_splits_and_what_is_not_there(tmp_path: Path) -> None:
    lists, pictures = vg_files()
    source = write_tree(tmp_path, lists | pictures)
    assert set(pairs(read_items("vg-paragraphs", source, splits="val,test"))) == {"13", "2388350"}
    (source / "val_split.json").write_text("{}")
    with pytest.raises(ValueError, match=r"val_split\.json is no list of image ids"):
        read_items("vg-paragraphs", source)
    (source / "val_split.json").unlink()
    with pytest.raises(ValueError, match=r"holds no val_split\.json; it holds .*vg-paragraphs needs:"):
        read_items("vg-paragraphs", source)
