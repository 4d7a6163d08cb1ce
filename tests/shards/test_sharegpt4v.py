"""ShareGPT4V: read row by row, in portions, whatever the size of the array."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shards.sources.sharegpt4v import LIST
from shards.sources.table import stream_array
from tests.shards.layouts import write_tree, write_zip
from tests.shards.layouts_more import sharegpt4v_row, sharegpt4v_rows
from tests.shards.reading import pairs, read_items, reasons


def write_list(folder: Path, rows: list[dict[str, Any]], prefix: bytes = b"") -> Path:
    # Other lists lie beside it, and the first by name is not the right one.
    files = {LIST: prefix + json.dumps(rows).encode(), "mix665k.json": b"[]", "a_cap100k.json": b"[]"}
    return write_tree(folder, files)


def write_pictures(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_tree(folder, {row["image"]: row["image"].encode() for row in rows if "/" in row.get("image", "")})


def test_the_first_thousand_rows_are_the_test(tmp_path: Path) -> None:
    rows = sharegpt4v_rows(1500)
    source = write_list(tmp_path / "lists", rows)
    images = write_pictures(tmp_path / "data", rows)
    items = read_items("sharegpt4v", source, images)
    found = pairs(items)
    assert [pair.split for pair in found.values()] == ["test"] * 1000 + ["train"] * 498
    assert list(found)[999:1001] == ["coco/train2017/999", "sam/images/1000"]
    assert found["sam/images/1000"].captions == ["A thing. Number 1000."]
    assert found["sam/images/1000"].image == b"sam/images/1000.jpg"
    assert found["sam/images/1000"].meta == {"image": "sam/images/1000.jpg"}
    assert reasons(items) == {
        "row 1499": "no 'image' among id, conversations",
        "row 1500": "'conversations' has no second turn, which is the caption",
    }
    assert list(pairs(read_items("sharegpt4v", source, images, splits="test"))) == list(found)[:1000]
    assert list(pairs(read_items("sharegpt4v", source, images, splits="train"))) == list(found)[1000:]


def test_missing_roots_are_counted_and_the_folder_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shards.folder import FolderStore

    rows = sharegpt4v_rows(2600)
    source = write_list(tmp_path, rows)
    write_pictures(tmp_path, [row for row in rows if not row.get("image", "").startswith("sam")])
    walks = []
    walk = FolderStore._walk
    monkeypatch.setattr(FolderStore, "_walk", lambda self: walks.append(1) or walk(self))
    items = read_items("sharegpt4v", source)
    absent = [id for id in reasons(items) if id.startswith("sam")]
    assert len(absent) == 866  # numbers 1, 4, ..., 2596
    assert len(pairs(items)) == 2598 - 866
    assert len(walks) == 1


def test_memory_does_not_grow_with_the_array(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "word " * 2000}]
    rows = (json.dumps(sharegpt4v_row(n, f"sam/{n}.jpg", conversations=turns)) for n in range(4000))
    path = tmp_path / LIST
    with path.open("w") as file:
        file.write("[" + next(rows))
        file.writelines(f",\n{row}" for row in rows)
        file.write("]")
    assert path.stat().st_size > 40_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in stream_array(path)) == 4000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_damaged_and_unfit_lists(tmp_path: Path) -> None:
    rows = sharegpt4v_rows(30)
    source = write_list(tmp_path, rows, prefix=b"\xef\xbb\xbf")
    write_pictures(tmp_path, rows)
    assert len(pairs(read_items("sharegpt4v", source))) == 28, "a byte order mark is passed over"
    path = source / LIST
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{LIST} is cut off or not JSON: "):
        read_items("sharegpt4v", source)
    with pytest.raises(ValueError, match="holds no JSON array"):
        list(stream_array(write_tree(tmp_path / "b", {"x.json": b' {"images": []}'}) / "x.json"))
    mixed = write_tree(tmp_path / "c", {"x.json": b'[1, {"a": 0.5}]'}) / "x.json"
    assert list(islice(stream_array(mixed), 2)) == [(1, "not a JSON object but int"), (2, {"a": 0.5})]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"holds no {LIST}"):
        read_items("sharegpt4v", source)
    with pytest.raises(ValueError, match="IMAGES must be a folder"):
        read_items("sharegpt4v", mixed, write_zip(tmp_path / "x.zip", {}))
