"""What two sets share, and the list of contents that says so without reading pictures."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from shards.contents import CONTENTS, content_line, content_of
from shards.overlap import overlap, overlaps
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.conftest import Write, row
from tests.shards.layouts import dci_files, jpeg, write_jsonl, write_tree


@pytest.fixture
def dci(tmp_path: Path) -> tuple[Path, Path]:
    """DCI and Long-DCI, of the same photographs."""
    annotations, photos = dci_files()
    source = write_tree(tmp_path / "dci", annotations)
    write_tree(source / "densely_captioned_images" / "photos", photos)
    for name in ("dci", "long-dci"):
        write_set(name, source=str(source), out=str(tmp_path / "sets" / name))
    return tmp_path / "sets" / "dci", tmp_path / "sets" / "long-dci"


def make(folder: Path, rows: list[dict[str, Any]], files: dict[str, bytes]) -> Path:
    write_tree(folder, files)
    write_set("pairs", source=str(write_jsonl(folder / "list.jsonl", rows)), out=str(folder / "set"))
    return folder / "set"


def test_long_dci_holds_the_training_set_of_dci(dci: tuple[Path, Path], tmp_path: Path) -> None:
    found = overlap(dci[0] / "train", dci[1] / "test")
    assert (found.size_a, found.size_b) == (1, 4)
    assert found.ids == found.pictures == found.captions == found.pairs == ("sa_1545001",)
    assert found.line() == ("dci/train (1) and long-dci/test (4) share 1 id, 1 picture, 1 caption: sa_1545001")
    warning = found.warning()
    assert warning is not None
    assert warning.endswith("1 of 4 pairs of long-dci/test were trained on: its figures are too good")
    unseen = tmp_path / "sets" / "unseen"
    write_set("long-dci", source=str(tmp_path / "dci"), out=str(unseen), options={"without_dci_train": "yes"})
    none = overlap(dci[0] / "train", unseen / "test")
    assert not none
    assert none.warning() is None
    assert none.line() == "dci/train (1) and unseen/test (3) share no id, picture or caption"


def test_each_respect_is_found_apart(tmp_path: Path) -> None:
    files = {f"{number}.jpg": jpeg(number * 20) for number in range(4)}
    a = make(tmp_path / "a", [row(f"{number}.jpg", f"caption {number}") for number in range(4)], files)
    other = {
        "0.jpg": jpeg(200),  # an id of the first set, for another picture
        "copy.jpg": files["1.jpg"],  # its picture under another name
        "words.jpg": jpeg(210),  # its words
        "new.jpg": jpeg(220),
    }
    rows = [row("0.jpg", "x"), row("copy.jpg", "y"), row("words.jpg", ["z", "caption 2"]), row("new.jpg", "new")]
    b = make(tmp_path / "b", rows, other)
    found = overlap(a / "train", b / "train")
    assert (found.ids, found.pictures, found.captions) == (("0",), ("copy",), ("words",))
    assert found.pairs == ("copy", "words", "0")
    assert "2 of 4 pairs of set/train were trained on" in str(found.warning())
    same_number = make(tmp_path / "c", rows[:1], other)
    assert "ids alone are shared" in str(overlap(a / "train", same_number / "train").warning())


def test_sets_are_compared_split_by_split(dci: tuple[Path, Path]) -> None:
    lines = [found.line() for found in overlaps(str(dci[0]), str(dci[1]))]
    assert [line.split(" share ")[0].replace(" and long-dci/test (4)", "") for line in lines] == [
        "dci/test (1)",
        "dci/train (1)",
        "dci/unlisted (1)",
        "dci/val (1)",
    ]
    assert len(overlaps(str(dci[0] / "train"), str(dci[1]))) == 1
    assert len(overlaps(str(dci[0]), str(dci[0]))) == 6, "four splits, each with each other one, once"
    with pytest.raises(ValueError, match="holds no split"):
        overlaps(str(dci[0].parent), str(dci[1]))


def test_contents_are_hashes_of_what_was_written(write: Write, tmp_path: Path) -> None:
    write([row("1.jpg", ["one", " ", "zwei ♥"])], {"1.jpg": jpeg(9)})
    path = tmp_path / "out" / "train" / CONTENTS
    assert json.loads(path.read_text()) == {
        "id": "1",
        "image": xxhash.xxh3_128(jpeg(9)).hexdigest(),
        "captions": [xxhash.xxh3_64(b"one").hexdigest(), xxhash.xxh3_64("zwei ♥".encode()).hexdigest()],
    }
    whole = path.read_text()
    path.write_text(whole.replace('"1"', '"2"'))
    problems = verify_set(tmp_path / "out").problems
    assert [problem.partition("train")[2] for problem in problems] == [
        "/contents.jsonl was altered after the set was written",
        ", pair 0: it is not what contents.jsonl says",
    ]
    path.write_text("{}\n")
    assert "contents.jsonl cannot be read" in "".join(verify_set(tmp_path / "out").problems)
    with pytest.raises(ValueError, match=r"contents\.jsonl cannot be read"):
        overlap(path.parent, path.parent)
    path.unlink()
    assert [problem.partition("train")[2] for problem in verify_set(tmp_path / "out").problems] == [
        "/contents.jsonl is missing"
    ]


def test_a_set_without_contents_is_read_instead(dci: tuple[Path, Path], tmp_path: Path) -> None:
    """As sets were before there were lists of contents: no file, and nothing about it in the receipt."""
    old = Path(shutil.copytree(dci[0], tmp_path / "old" / "dci"))
    manifest = json.loads((old / "manifest.json").read_text())
    for split, entry in manifest["splits"].items():
        (old / split / CONTENTS).unlink()
        del entry["contents"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    assert verify_set(old).ok
    found = overlap(old / "train", dci[1] / "test")
    assert found.ids == found.pictures == found.captions == ("sa_1545001",)


def test_ten_thousand_pairs_are_compared_from_their_lists_alone(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 9_990)):
        (tmp_path / name).mkdir()
        contents = (
            content_of(f"{number}", b"%d" % number, [f"caption {number}"]) for number in range(first, first + 10_000)
        )
        (tmp_path / name / CONTENTS).write_text("".join(map(content_line, contents)))
    start = time.perf_counter()
    found = overlap(tmp_path / "a", tmp_path / "b")
    print(f"{time.perf_counter() - start:.3f} s for 10,000 against 10,000 pairs")
    assert found.ids == found.pictures == found.captions == tuple(str(number) for number in range(9_990, 10_000))
