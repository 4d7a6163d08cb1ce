"""A set written in parts and merged is the set, whatever the number of parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shards import parts as parts_module
from shards import writer
from shards.merge import merge_parts
from shards.pair import Item, Missing, Pair, Rejected
from shards.parts import Part
from shards.reader import ShardReader
from shards.sources.base import Reading, Source
from shards.verify import verify_set
from shards.work import Work
from shards.writer import write_set
from tests.shards.layouts import jpeg
from tests.shards.resume import OPTIONS, SMALL, leftovers, make_source, tree


def samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The pairs of each split, in order."""
    readers = {path.parent.name: ShardReader(path.parent) for path in folder.glob("*/index.json")}
    return {split: [reader[index] for index in range(len(reader))] for split, reader in readers.items()}


def write_parts(folder: Path, of: int, **more: Any) -> list[str]:
    outs = [folder / f"part-{number}-of-{of}" for number in range(1, of + 1)]
    for number, out in enumerate(outs, 1):
        write_set(out=str(out), part=Part(number, of), **{"options": OPTIONS, "format": SMALL, **more})
    return [str(out) for out in outs]


@pytest.fixture(params=["count known", "count unknown", "pieces"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of `write_set` for a source that says how many items it has, and for one that does not."""
    if request.param == "count known":
        return make_source(tmp_path / "in")

    def items() -> Iterator[Item]:
        for number in range(41):
            split = "val" if number % 5 == 2 else "train"
            if number % 13 == 4:
                yield Rejected(f"r{number}", "odd", split)
            elif number % 17 == 9:
                yield Missing(f"m{number}", "gone.jpg", split=split)
            else:
                yield Pair(f"p{number}", jpeg(number), [f"caption {number}"], split)

    def read(_: Any) -> Reading:
        if request.param == "count unknown":
            return Reading(items())
        return Reading.of([lambda first=first: islice(items(), first, first + 5) for first in range(0, 41, 5)])

    unknown = Source(name="counted", summary="", licence="", needs="", read=read)
    monkeypatch.setattr(writer, "get_source", lambda _: unknown)
    monkeypatch.setattr(parts_module, "BLOCK", 4)
    return {"name": "counted", "options": {}, "allow_missing": 5}


@pytest.mark.parametrize("of", [1, 2, 3, 7, 50])
def test_merged_parts_are_the_whole(of: int, source: dict[str, Any], tmp_path: Path) -> None:
    whole = write_set(out=str(tmp_path / "whole"), **{"options": OPTIONS, "format": SMALL, **source})
    report = merge_parts(str(tmp_path / "merged"), list(reversed(write_parts(tmp_path, of, **source))))
    assert samples(tmp_path / "merged") == samples(tmp_path / "whole")
    assert verify_set(tmp_path / "merged").ok
    assert (report.written, report.rejected, report.missing, report.wanted, report.bytes, report.empty_captions) == (
        (whole.written, whole.rejected, whole.missing, whole.wanted, whole.bytes, whole.empty_captions)
    )
    for split in whole.written:
        assert (tmp_path / "merged" / split / "contents.jsonl").read_bytes() == (
            (tmp_path / "whole" / split / "contents.jsonl").read_bytes()
        )
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("merged", "whole")]
    assert manifests[0]["request"] == manifests[1]["request"]
    for note in ("rejected.jsonl", "missing.jsonl"):
        lines = [(tmp_path / name / note) for name in ("merged", "whole") if (tmp_path / name / note).exists()]
        assert len(lines) in (0, 2)
        assert len({tuple(sorted(path.read_text().splitlines())) for path in lines}) <= 1
    assert leftovers(tmp_path / "merged") == []


def test_parts_without_a_place_are_beside_the_set_that_they_belong_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_source(tmp_path / "in")
    for number in (1, 2):
        write_set(part=Part(number, 2), options=OPTIONS, format=SMALL, **source)
    assert [path.as_posix() for path in sorted(Path("data/mds").glob("*/*"))] == [
        *("data/mds/pairs.parts/1-of-2", "data/mds/pairs.parts/2-of-2")
    ]
    merge_parts("data/mds/pairs", ["data/mds/pairs.parts/1-of-2", "data/mds/pairs.parts/2-of-2"])
    write_set(out="whole", options=OPTIONS, format=SMALL, **source)
    assert samples(Path("data/mds/pairs")) == samples(Path("whole"))


@contextmanager
def stopping_after(count: int) -> Iterator[None]:
    """A write or merge inside is interrupted when it stores another shard."""
    stored, store = [], Work.store

    def store_or_stop(self: Work, *args: Any) -> None:
        if len(stored) == count:
            raise KeyboardInterrupt
        stored.append(args)
        store(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "store", store_or_stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("before", ["write", "merge of others", "merge of the same"])
def test_a_merge_takes_only_its_own_shards_for_its_own(before: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    parts, others = (write_parts(tmp_path, of, **source) for of in (6, 4))
    out = str(tmp_path / "merged")
    with stopping_after(4):
        if before == "write":
            write_set(out=out, options=OPTIONS, format=SMALL, **source)
        else:
            merge_parts(out, others if before == "merge of others" else parts)
    assert leftovers(tmp_path / "merged") == [".merged.writing"]
    merge_parts(out, parts)
    write_set(out=str(tmp_path / "whole"), options=OPTIONS, format=SMALL, **source)
    assert samples(tmp_path / "merged") == samples(tmp_path / "whole")
    assert verify_set(tmp_path / "merged").ok
    assert leftovers(tmp_path / "merged") == []


def test_a_write_does_not_go_on_with_the_shards_of_a_merge(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    parts = write_parts(tmp_path, 6, **source)
    with stopping_after(4):
        merge_parts(str(tmp_path / "out"), parts)
    for name in ("out", "whole"):
        write_set(out=str(tmp_path / name), options=OPTIONS, format=SMALL, **source)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_merged_set_answers_the_request_of_the_whole(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    places = write_parts(tmp_path, 3, **source)
    merge_parts(str(tmp_path / "merged"), places)
    assert write_set(out=str(tmp_path / "merged"), options=OPTIONS, format=SMALL, **source).already_there
    assert merge_parts(str(tmp_path / "merged"), places).already_there
    shard, part = (tmp_path / name / "train" / "shard.00000.mds" for name in ("merged", "part-1-of-3"))
    assert os.path.samefile(shard, part), "shards are linked"


def test_each_part_says_what_it_is(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    write_parts(tmp_path, 3, **source)
    manifest = json.loads((tmp_path / "part-2-of-3" / "manifest.json").read_text())
    assert (manifest["part"]["number"], manifest["part"]["of"], manifest["part"]["items"]) == (2, 3, 40)
    # Of 40 items, the second third is 13 to 25: four in 7 of them have the remainder 3, two are broken.
    assert manifest["counts"]["wanted"] == 13
    with pytest.raises(ValueError, match="it was part 2 of 3, now the whole"):
        write_set(out=str(tmp_path / "part-2-of-3"), options=OPTIONS, format=SMALL, **source)


def test_incomplete_repeated_and_foreign_parts_are_named(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    one, two, three = write_parts(tmp_path, 3, **source)
    out = str(tmp_path / "merged")
    with pytest.raises(ValueError, match="part 2 of 3 of pairs missing"):
        merge_parts(out, [one, three])
    shutil.copytree(two, tmp_path / "again")
    with pytest.raises(ValueError, match="are both part 2 of 3"):
        merge_parts(out, [one, two, three, str(tmp_path / "again")])
    (other,) = write_parts(tmp_path, 1, **source, check="header")
    with pytest.raises(ValueError, match="belong to different requests"):
        merge_parts(out, [one, two, three, other])
    write_set(out=str(tmp_path / "whole"), options=OPTIONS, format=SMALL, **source)
    with pytest.raises(ValueError, match="whole is no part of a set"):
        merge_parts(out, [one, str(tmp_path / "whole")])
    assert not Path(out).exists()


def test_an_id_in_two_parts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Pair("a", jpeg(1), ["x"], "train"), Pair("b", jpeg(2), ["x"], "train"), Pair("a", jpeg(3), ["x"], "val")]
    source = Source(name="two", summary="", licence="", needs="", read=lambda _: Reading(iter(items), len(items)))
    monkeypatch.setattr(writer, "get_source", lambda _: source)
    places = write_parts(tmp_path, 2, name="two", options={})
    with pytest.raises(ValueError, match=r"the id 'a' is in .*part-1-of-2 and in .*part-2-of-2"):
        merge_parts(str(tmp_path / "merged"), places)
    assert not (tmp_path / "merged").exists()
    assert leftovers(tmp_path / "merged") == [] or leftovers(tmp_path / "merged") == [".merged.writing"]


def test_parts_of_a_source_that_changed_in_between_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 10

    def read(_: Any) -> Reading:
        return Reading((Pair(f"{n}", jpeg(n), ["x"], "train") for n in range(count)), count)

    source = Source(name="growing", summary="", licence="", needs="", read=read)
    monkeypatch.setattr(writer, "get_source", lambda _: source)
    write_set("growing", out=str(tmp_path / "a"), part=Part(1, 2))
    count = 12
    write_set("growing", out=str(tmp_path / "b"), part=Part(2, 2))
    with pytest.raises(ValueError, match=r"the source had 12 items when .*b was written and 10 for .*a"):
        merge_parts(str(tmp_path / "merged"), [str(tmp_path / "a"), str(tmp_path / "b")])


def test_a_part_opens_no_piece_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def piece(number: int) -> Iterator[Item]:
        opened.append(number)
        yield Pair(f"{number}", jpeg(number), ["x"], "train")

    def read(_: Any) -> Reading:
        return Reading.of([partial(piece, number) for number in range(8)])

    source = Source(name="tars", summary="", licence="", needs="", read=read)
    monkeypatch.setattr(writer, "get_source", lambda _: source)
    write_set("tars", out=str(tmp_path / "out"), part=Part(2, 3))
    assert opened == [2, 3, 4]


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "1/0"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="part"):
        Part.parse(text)
