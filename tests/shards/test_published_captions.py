"""The caption lists of DCI, DOCCI, Urban-1K and IIW as published: read as they are, with known counts and lengths.

Of their pictures none can be had here, so each gets a file of its own: one small picture with a number behind its end.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shards.info import describe_set
from shards.names import split_path
from shards.reader import ShardReader
from shards.writer import write_set
from tests.shards.real import CAPTIONS, picture, published


def write_published(tmp_path: Path, name: str, source: str, names: list[str], **options: str) -> Path:
    """A set of a published list with stand-in pictures."""
    images = tmp_path / "pictures.zip"
    with zipfile.ZipFile(images, "w") as archive:
        for number, image in enumerate(names):
            archive.writestr(image, picture(0, "P") + str(number).encode())
    out = tmp_path / "set"
    write_set(name, source=str(CAPTIONS / source), images=str(images), out=str(out), options=options, check="header")
    return out


# Words as data-formats.md has them: mean to one decimal, median, least, most.
@pytest.mark.parametrize(
    ("source", "number", "words"),
    [
        ("dci_goal_test.json", 1999, (132.8, 112, 5, 750)),
        ("docci_goal_test.json", 5100, (122.9, 115, 28, 518)),
        ("urban1k_goal.json", 1000, (107.3, 106, 74, 179)),
    ],
)
def test_goal_tests(source: str, number: int, words: tuple[float, ...], tmp_path: Path) -> None:
    rows = published(source)
    out = write_published(tmp_path, "goal-json", source, [f"p/{split_path(row['filename'])[-1]}" for row in rows])
    split = describe_set(out).splits["test"]
    lengths = sorted(split.words)
    assert split.num_pairs == len(split.words) == number
    middle = (lengths[(number - 1) // 2] + lengths[number // 2]) / 2
    assert (round(sum(lengths) / number, 1), middle, lengths[0], lengths[-1]) == words
    reader = ShardReader(out / "test")
    written = {reader[index]["meta"]["image"]: reader[index]["captions"] for index in range(number)}
    assert written == {row["filename"]: [row["caption"]] for row in rows}, "every caption, character for character"


def test_goal_segments(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = published("dci_goal_segments.json")  # type: ignore[assignment]
    names = ["/".join(split_path(row["filename"])[-2:]) for row in rows]
    out = write_published(tmp_path, "goal-json", "dci_goal_segments.json", names)
    reader = ShardReader(out / "test")
    assert len(reader) == len(rows) == 5446
    first, box = reader[0], rows[0]["bbox_coordinates"]
    by_image = {row["filename"]: row for row in rows}
    row = by_image[first["meta"]["image"]]
    box = row["bbox_coordinates"]
    assert first["captions"] == [row["caption"]]
    assert first["meta"]["box"] == [box["x1"], box["y1"], box["x2"], box["y2"]]
    assert first["meta"]["similarity_score"] == row["similarity_score"]


@pytest.mark.parametrize(
    ("part", "number", "mean", "key"),
    [("IIW-400", 400, 193.3, "image/key"), ("DCI_Test", 112, 205.3, "image"), ("DOCCI_Test", 100, 201.9, "image")],
)
def test_iiw(part: str, number: int, mean: float, key: str, tmp_path: Path) -> None:
    rows = published(f"iiw/{part}.jsonl")
    names = [name if (name := row[key]).endswith(".jpg") else f"{name}.jpg" for row in rows]
    out = write_published(tmp_path, "iiw", f"iiw/{part}.jsonl", names, part=part, captions="all")
    reader = ShardReader(out / "test")
    pairs = {pair["id"]: pair for pair in map(reader.__getitem__, range(len(reader)))}
    assert len(pairs) == number
    expected = {
        row[key].removesuffix(".jpg"): [row["IIW"], *([row["DOCCI"]] if "DOCCI" in row else [])] for row in rows
    }
    assert {id: pair["captions"] for id, pair in pairs.items()} == expected
    assert round(sum(len(pair["captions"][0].split()) for pair in pairs.values()) / number, 1) == mean
    objects = sum(len(row.get("objects", ())) for row in rows)
    assert sum(len(pair["meta"].get("regions", ())) for pair in pairs.values()) == objects


def test_goal_splits_of_dci(tmp_path: Path) -> None:
    """GOAL's real lists against annotations of some of their photographs: nothing else is in the set."""
    from tests.shards.layouts import dci_annotation, write_tree
    from tests.shards.reading import pairs, read_items

    test = [split_path(row["filename"])[-1] for row in published("dci_goal_test.json")[:20]]
    train = [
        split_path(row["filename"])[-2].removesuffix("_results") for row in published("dci_goal_segments.json")[:20]
    ]
    base = "densely_captioned_images"
    annotations = {
        f"{base}/annotations/{number}-data.json": json.dumps(dci_annotation(image, "short", f"extra {number}")).encode()
        for number, image in enumerate([*test, *train, "sa_7.jpg"])
    }
    annotations[f"{base}/splits.json"] = b'{"train": [], "valid": [], "test": ["0-data.json"]}'
    photos = {f"{base}/photos/{image}": picture(0) for image in [*test, *train, "sa_7.jpg"]}
    source = write_tree(tmp_path, annotations | photos)
    lists = {
        f"goal_{split}": str(CAPTIONS / f"dci_goal_{file}.json")
        for split, file in (("train", "segments"), ("test", "test"))
    }
    found = pairs(read_items("dci", source, **lists))
    expected = dict.fromkeys((image[:-4] for image in test), "test") | dict.fromkeys(
        (image[:-4] for image in train), "train"
    )
    assert {id: pair.split for id, pair in found.items()} == expected
