"""Urban-1K as its zip unpacks, and the zip itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shards.layouts import as_container, write_tree
from tests.shards.layouts_dense import urban1k_files
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
@pytest.mark.parametrize("root", ["Urban1k", "Urban1k/Urban1k"])
def test_pairs_of_each_layout(kind: str, root: str, tmp_path: Path) -> None:
    files = urban1k_files(root)
    items = read_items("urban1k", as_container(kind, tmp_path, files))
    found = pairs(items)
    assert list(found) == ["1", "2", "3", "10"], "by number, not by name"
    assert all(pair.image == files[f"{root}/image/{id}.jpg"] and pair.split == "test" for id, pair in found.items())
    assert [pair.captions for pair in found.values()] == [
        [caption(4)],
        ["A façade — with a ♥, l’été."],
        ["The first line."],
        ["A byte order mark."],
    ]
    assert reasons(items) == {"11": "its caption is not UTF-8: unexpected end of data at byte 3"}


def test_pictures_elsewhere_and_captions_missing(tmp_path: Path) -> None:
    files = urban1k_files()
    texts = as_container(
        "folder", tmp_path / "a", {name: data for name, data in files.items() if name.endswith(".txt")}
    )
    pictures = as_container("zip", tmp_path / "b", {name: data for name, data in files.items() if name.endswith("jpg")})
    assert set(pairs(read_items("urban1k", texts, pictures))) == {"1", "2", "3", "10"}
    with pytest.raises(ValueError, match=r"holds no caption/\*\.txt; it holds Urban1k/image/1\.jpg, .*Urban1k\.zip"):
        read_items("urban1k", pictures)


def test_the_zip_as_it_is_downloaded(tmp_path: Path) -> None:
    files = urban1k_files()
    as_container("zip", tmp_path, files).rename(tmp_path / "Urban1k.zip")
    found = pairs(read_items("urban1k", tmp_path))
    assert {id: pair.image for id, pair in found.items()} == {
        id: files[f"Urban1k/image/{id}.jpg"] for id in ("1", "2", "3", "10")
    }
    write_tree(tmp_path, files)
    assert len(read_items("urban1k", tmp_path)) == 5, "an unpacked copy beside it is the same set, not a second one"
