"""The source `pairs`: tables and lists of captions in all the forms that people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shards.pair import Item, Missing, Pair, Rejected
from shards.sources import get_source
from shards.sources.base import Request, hash_split
from shards.sources.table import read_rows
from tests.shards.layouts import UNICODE_CAPTION, jpeg, write_csv, write_jsonl, write_tree


def read(source: Path, images: Path | None = None, **options: str) -> list[Item]:
    pairs = get_source("pairs")
    filled = {key: options.get(key, option.default) for key, option in pairs.options.items()}
    reading = pairs.read(Request(source, images, filled))
    items = list(reading)
    assert reading.wanted == len(items)
    return items


def captions(items: list[Item]) -> dict[str, list[str]]:
    return {item.id: item.captions for item in items if isinstance(item, Pair)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tree(tmp_path, {f"{n}.jpg": jpeg(n) for n in range(4)})


@pytest.mark.parametrize(
    ("image_key", "caption_key"),
    [
        ("image", "caption"),
        ("image_file", "description"),
        ("filename", "caption"),
        ("original_filename", "original_caption"),
        ("image/key", "text"),
    ],
)
def test_well_known_columns(image_key: str, caption_key: str, folder: Path) -> None:
    rows = [{image_key: "../theirs/images/1.jpg", caption_key: UNICODE_CAPTION}]
    items = read(write_jsonl(folder / "list.jsonl", rows))
    assert captions(items) == {"theirs/images/1": [UNICODE_CAPTION]}
    assert [item.image for item in items if isinstance(item, Pair)] == [jpeg(1)]


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("bom", [False, True])
def test_tables(suffix: str, delimiter: str, bom: bool, folder: Path) -> None:
    rows = [["1.jpg", UNICODE_CAPTION], ["2.jpg", 'quotes " and, commas']]
    path = write_csv(folder / f"t.{suffix}", ["image", "caption"], rows, delimiter, bom)
    assert captions(read(path)) == {"1": [UNICODE_CAPTION], "2": ['quotes " and, commas']}


def test_json_array(folder: Path) -> None:
    path = folder / "list.json"
    path.write_text(json.dumps([{"filename": "/abs/1.jpg", "caption": "one"}, 7]))
    items = read(path)
    assert captions(items) == {"abs/1": ["one"]}
    assert Rejected("line 2", "not a JSON object but int") in items


def test_several_rows_and_lists_become_several_captions(folder: Path) -> None:
    rows = [
        {"image": "1.jpg", "captions": ["a", None]},
        {"image": "2.jpg", "captions": "x"},
        {"image": "1.jpg", "captions": ["b"]},
    ]
    assert captions(read(write_jsonl(folder / "l.jsonl", rows))) == {"1": ["a", "", "b"], "2": ["x"]}


def test_bad_rows_are_rejected_by_line(folder: Path) -> None:
    lines = ['{"image": "1.jpg", "caption": "a"}', "", "{oops", '{"image": "2.jpg"}', '{"caption": "b"}']
    lines += [
        '{"image": null, "caption": "b"}',
        '{"image": "2.jpg", "caption": 5}',
        '{"image": "3.jpg", "caption": "c"}',
    ]
    (folder / "l.jsonl").write_text("\n".join(lines))
    items = read(folder / "l.jsonl")
    assert set(captions(items)) == {"1", "3"}
    found = {item.id: item.reason for item in items if isinstance(item, Rejected)}
    assert list(found) == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    assert found["line 4"] == "no 'caption' among image"
    assert "int, not text" in found["line 7"]


def test_line_numbers_of_a_table_are_where_rows_start(folder: Path) -> None:
    path = write_csv(folder / "t.csv", ["image", "caption"], [["1.jpg", "two\nlines"], ["", "no image"]])
    assert [item.id for item in read(path) if isinstance(item, Rejected)] == ["line 4"]


def test_stated_columns_and_ids(folder: Path) -> None:
    rows = [{"pic": "1.jpg", "words": "a", "key": 17, "part": "dev"}, {"pic": "1.jpg", "words": "b", "key": 18}]
    path = write_jsonl(folder / "l.jsonl", rows)
    items = read(path, image_key="pic", caption_key="words", id_key="key", split_key="part", split="rest")
    assert [(item.id, item.split, item.image) for item in items if isinstance(item, Pair)] == [
        ("17", "dev", jpeg(1)),
        ("18", "rest", jpeg(1)),
    ]
    with pytest.raises(
        ValueError, match=r"no column of images; its columns are pic, words, key, part: state image_key"
    ):
        read(path)
    with pytest.raises(ValueError, match="no column 'nope'"):
        read(path, image_key="nope", caption_key="words")


def test_contradictions_are_rejected(folder: Path) -> None:
    rows = [
        {"image": "1.jpg", "caption": "a", "split": "train"},
        {"image": "1.jpg", "caption": "b", "split": "test"},
        {"image": "1.png", "caption": "c", "split": "train"},
    ]
    items = read(write_jsonl(folder / "l.jsonl", rows))
    assert captions(items) == {"1": ["a"]}
    found = {item.id: item.reason for item in items if isinstance(item, Rejected)}
    assert "split 'train' already" in found["line 2"]
    assert "already stands for '1.jpg'" in found["line 3"]


def test_hash_split_depends_on_the_id_alone(folder: Path) -> None:
    items = read(write_jsonl(folder / "l.jsonl", [{"image": "1.jpg", "caption": "a"}]), split="hash")
    assert [item.split for item in items if isinstance(item, Pair)] == [hash_split("1")]
    # sha256("1") = 6b86b273ff34fce1...; 0x6b86b273ff34fce1 = ...913, so bucket 3
    assert 0x6B86B273FF34FCE1 % 10 == 3
    assert hash_split("1") == "train"
    shares = [sum(hash_split(str(n)) == split for n in range(5000)) for split in ("train", "val", "test")]
    assert shares == pytest.approx([4000, 500, 500], abs=100)


def test_missing_pictures_are_named(folder: Path) -> None:
    items = read(write_jsonl(folder / "l.jsonl", [{"image": "gone/9.jpg", "caption": "a"}]))
    (missing,) = items
    assert isinstance(missing, Missing)
    assert (missing.id, missing.image_name, missing.split) == ("gone/9", "gone/9.jpg", "train")


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "latin.csv").write_bytes("image,caption\n1.jpg,caf\xe9\n".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read(folder / "latin.csv")
    (folder / "x.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"none of \.jsonl"):
        read(folder / "x.xlsx")
    (folder / "open.csv").write_text('image,caption\n1.jpg,"' + "x" * 200_000)
    with pytest.raises(ValueError, match="quotation mark left open"):
        read(folder / "open.csv")
    with pytest.raises(FileNotFoundError, match="pairs needs: SOURCE="):
        read(folder / "nowhere.csv")
    with pytest.raises(ValueError, match="pairs needs: SOURCE="):
        get_source("pairs").read(Request(None, None, {}))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30)
HYPOTHESIS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@HYPOTHESIS
@given(rows=st.lists(st.tuples(TEXT.filter(str.strip), TEXT), max_size=8), kind=st.sampled_from(["csv", "tsv"]))
def test_any_table_comes_back_as_it_was_written(rows: list[tuple[str, str]], kind: str, tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / f"t.{kind}", ["image", "caption"], [list(row) for row in rows], "\t" if kind == "tsv" else ","
    )
    assert [(row["image"], row["caption"]) for _, row in read_rows(path) if isinstance(row, dict)] == rows


@HYPOTHESIS
@given(rows=st.lists(st.dictionaries(TEXT, TEXT | st.lists(TEXT) | st.none() | st.integers(), max_size=4), max_size=6))
def test_any_jsonl_comes_back_as_it_was_written(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", rows)
    assert list(read_rows(path)) == list(enumerate(rows, start=1))
