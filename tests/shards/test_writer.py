"""Writing a set: bytes, counts, reasons, and what is done where a set is there already."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shards.reader import ShardReader
from shards.report import Progress
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.conftest import Write, row, siblings
from tests.shards.layouts import UNICODE_CAPTION, as_container, encoded, jpeg, write_jsonl, write_tree


def reasons(out: Path) -> dict[str, str]:
    lines = (out / "rejected.jsonl").read_text().splitlines()
    return {line["id"]: line["reason"] for line in map(json.loads, lines)}


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "zip"])
def test_bytes_in_are_bytes_out(kind: str, tmp_path: Path) -> None:
    # Qualities that no re-encoding would give back, and a PNG that is called .jpg, as in COCO.
    files = {f"photos/{n}.jpg": jpeg(20 * n, quality=31 + n) for n in range(5)}
    files["photos/png.jpg"] = encoded(Image.new("RGBA", (8, 8), (9, 8, 7, 99)), "PNG")
    rows = [row(name, UNICODE_CAPTION) for name in files]
    source = write_jsonl(tmp_path / "list.jsonl", rows)
    images = as_container(kind, tmp_path / "store", files)
    write_set("pairs", source=str(source), images=str(images), out=str(tmp_path / "out"))

    expected = {name.removesuffix(".jpg"): hashlib.sha256(data).hexdigest() for name, data in files.items()}
    ours = ShardReader(tmp_path / "out" / "train")
    assert {
        pair["id"]: hashlib.sha256(pair["image"]).hexdigest() for pair in map(ours.__getitem__, range(6))
    } == expected
    assert all(ours[index]["captions"] == [UNICODE_CAPTION] for index in range(6))

    from streaming.base.format import reader_from_json

    index = json.loads((tmp_path / "out" / "train" / "index.json").read_text())
    theirs = [s for spec in index["shards"] for s in reader_from_json(str(tmp_path / "out" / "train"), "", spec)]
    assert {pair["id"]: hashlib.sha256(pair["image"]).hexdigest() for pair in theirs} == expected
    assert index["shards"][0]["column_names"] == ["captions", "id", "image", "meta"]
    assert set(index["shards"][0]["raw_data"]["hashes"]) == {"xxh64"}


def test_what_cannot_be_a_pair_is_rejected_by_id_and_counted(write: Write, tmp_path: Path) -> None:
    whole = jpeg(1, (200, 200))
    files = {
        "good.jpg": whole,
        "short.jpg": whole[: len(whole) // 2],
        "zero.jpg": b"",
        "page.jpg": b"<html>not found</html>",
        "blank.jpg": jpeg(2),
        "odd.jpg": jpeg(3),
    }
    rows = [row(name) for name in files if name not in ("blank.jpg", "odd.jpg")]
    rows += [row("blank.jpg", [None, " \n"]), row("odd.jpg", split="../up"), row("gone.jpg"), row("good.jpg", " ")]
    report = write(rows, files, allow_missing=1)
    assert (report.wanted, report.written, report.rejected, report.missing) == (7, {"train": 1}, 5, 1)
    assert report.empty_captions == 3
    found = reasons(tmp_path / "out")
    assert set(found) == {"short", "zero", "page", "blank", "odd"}
    assert "truncated" in found["short"]
    assert "empty" in found["zero"]
    assert "<html>" in found["page"]
    assert "caption" in found["blank"]
    assert "'../up'" in found["odd"]
    assert json.loads((tmp_path / "out" / "missing.jsonl").read_text())["image"] == "gone.jpg"
    text = "\n".join(report.lines())
    assert "wanted 7, written 1, rejected 5, missing 1" in text
    assert "missing gone: gone.jpg" in text
    assert "3 empty captions" in text
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert (counts["wanted"], counts["written"], counts["rejected"], counts["missing"]) == (7, 1, 5, 1)
    assert verify_set(tmp_path / "out").ok


def test_header_check_lets_a_truncated_picture_pass(write: Write) -> None:
    whole = jpeg(1, (200, 200))
    assert write([row("short.jpg")], {"short.jpg": whole[: len(whole) // 2]}, check="header").written == {"train": 1}


def test_duplicate_id_keeps_the_first(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shards import writer
    from shards.pair import Pair
    from shards.sources.base import Reading, Source

    items = [
        Pair("a", jpeg(1), ["first"], "train"),
        Pair("a", jpeg(2), ["second"], "test"),
        Pair("b", jpeg(3), ["b"], "test"),
    ]
    source = Source(name="two", summary="", licence="", needs="", read=lambda _: Reading(iter(items), 3))
    monkeypatch.setattr(writer, "get_source", lambda _: source)
    report = write_set("two", out=str(tmp_path / "out"))
    assert report.written == {"train": 1, "test": 1}
    assert reasons(tmp_path / "out") == {"a": "duplicate id"}
    assert ShardReader(tmp_path / "out" / "train")[0]["captions"] == ["first"]


def test_splits_go_to_their_folders(write: Write, tmp_path: Path) -> None:
    rows = [row(f"{n}.jpg", split=split) for n, split in enumerate(["train", "test", "qual_dev", "test"])]
    report = write(rows, {f"{n}.jpg": jpeg(n) for n in range(4)})
    assert report.written == {"train": 1, "test": 2, "qual_dev": 1}
    assert [ShardReader(tmp_path / "out" / "test")[n]["id"] for n in range(2)] == ["1", "3"]


def test_nothing_found_names_what_was_wanted_and_what_is_there(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)not one of 2 .*'a/1\.jpg'.*other\.png.*IMAGES"):
        write([row("a/1.jpg"), row("a/2.jpg")], {"other.png": b""})
    assert not (tmp_path / "out").exists()
    assert siblings(tmp_path / "out") == []


def test_all_rejected_is_an_error_with_the_reason(write: Write) -> None:
    with pytest.raises(ValueError, match=r"all 1 items were rejected, the first, a, because: .*empty"):
        write([row("a.jpg")], {"a.jpg": b""})


def test_same_request_again_is_a_no_op(write: Write, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "list.jsonl", [row("a.jpg")])
    write_tree(tmp_path, {"a.jpg": jpeg(1)})
    arguments: dict[str, Any] = {"source": str(source), "out": str(tmp_path / "out")}
    first = write_set("pairs", **arguments)
    index = tmp_path / "out" / "train" / "index.json"
    before = index.stat().st_ino
    second = write_set("pairs", **arguments)
    assert (first.already_there, second.already_there) == (False, True)
    assert (second.wanted, second.written) == (1, {"train": 1})
    assert "already there" in second.lines()[0]
    assert index.stat().st_ino == before


def test_another_request_is_refused_unless_overwrite(write: Write, tmp_path: Path) -> None:
    files = {"a.jpg": jpeg(1), "b.jpg": jpeg(2)}
    write([row("a.jpg")], files)
    arguments: dict[str, Any] = {"source": str(tmp_path / "in" / "list.jsonl"), "out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"another request \(split was 'train', now 'test'\): .*overwrite"):
        write_set("pairs", **arguments, options={"split": "test"})
    with pytest.raises(ValueError, match=r"\(images was the default, now '/.*/in'; check was 'decode', now 'header'\)"):
        write_set("pairs", **arguments, images=str(tmp_path / "in"), check="header")
    with pytest.raises(ValueError, match=r"\(source '.*list\.jsonl' has changed since\)"):
        write([row("a.jpg"), row("b.jpg")], files)
    assert write([row("a.jpg"), row("b.jpg")], files, overwrite=True).written == {"train": 2}
    assert verify_set(tmp_path / "out").ok
    assert siblings(tmp_path / "out") == []


def test_a_folder_of_something_else_is_never_overwritten(write: Write, tmp_path: Path) -> None:
    write_tree(tmp_path / "out", {"thesis.txt": b"years"})
    with pytest.raises(ValueError, match="is no set of ours"):
        write([row("a.jpg")], {"a.jpg": jpeg(1)}, overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_bytes() == b"years"


def test_unfit_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean openmoji"):
        write_set("openmojis")
    with pytest.raises(ValueError, match="openmoji takes no SOURCE"):
        write_set("openmoji", source="x")
    with pytest.raises(ValueError, match="ifct takes no IMAGES"):
        write_set("ifct", images="x")
    with pytest.raises(ValueError, match="pairs has no option 'colour'; its options: image_key"):
        write_set("pairs", source="x", options={"colour": "red"})
    with pytest.raises(ValueError, match="short, extra, extended, full, not 'long'"):
        write_set("dci", source="x", options={"caption": "long"})


def test_progress_counts_up_to_what_is_wanted(write: Write) -> None:
    seen: list[Progress] = []
    write([row(f"{n}.jpg") for n in range(3)], {"0.jpg": jpeg(0), "1.jpg": b""}, allow_missing=1, progress=seen.append)
    assert [(step.done, step.wanted) for step in seen] == [(1, 3), (2, 3), (3, 3)]


def test_equal_inputs_give_equal_files(write: Write, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "list.jsonl", [row(f"{n}.jpg") for n in range(4)])
    write_tree(tmp_path, {f"{n}.jpg": jpeg(n) for n in range(4)})
    trees = []
    for out in (tmp_path / "one", tmp_path / "two"):
        write_set("pairs", source=str(source), out=str(out))
        trees.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert trees[0] == trees[1]
    assert sorted(trees[0]) == ["manifest.json", "train/contents.jsonl", "train/index.json", "train/shard.00000.mds"]


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, shards.writer, shards.verify, shards.reader, shards.sources; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
