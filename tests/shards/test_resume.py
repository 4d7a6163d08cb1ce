"""A write that was cut short goes on where it was, and its set is that of an uninterrupted run, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shards.local import LocalWork
from shards.mds import ShardFormat
from shards.report import Progress
from shards.stopped import Stopped
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.layouts import jpeg
from tests.shards.resume import OPTIONS, SMALL, ids_written, leftovers, make_source, tree


def write(source: dict[str, str], out: Path, **more: Any) -> Any:
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, **source, **more}
    return write_set(out=str(out), **arguments)


def stop_after(count: int, error: type[BaseException]) -> Any:
    def stop(progress: Progress) -> None:
        if progress.done == count:
            raise error

    return stop


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
def test_the_next_run_goes_on_and_gives_the_same_bytes(
    error: type[BaseException], workers: int, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "in")
    whole = write(source, tmp_path / "whole")
    with pytest.raises(error):
        write(source, tmp_path / "out", progress=stop_after(25, error), workers=workers)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path / "out") == [".out.writing"]
    said: list[str] = []
    report = write(source, tmp_path / "out", say=said.append, workers=workers)
    assert 0 < report.went_on_after < whole.written["train"] + whole.written["val"]
    assert said == [f"going on: {report.went_on_after} pairs were already written"]
    assert f"{report.went_on_after} of them were written by a run before this one" in report.lines()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (report.written, report.rejected, report.empty_captions, report.bytes) == (
        (whole.written, whole.rejected, whole.empty_captions, whole.bytes)
    )
    assert leftovers(tmp_path / "out") == []
    assert verify_set(tmp_path / "out").ok


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_that_cannot_take_up_what_is_there_leaves_it(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "in")
    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "out", progress=stop_after(35, KeyboardInterrupt))

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LocalWork, "_trim", fails)
        with pytest.raises(error):
            write(source, tmp_path / "out")
    assert write(source, tmp_path / "out").went_on_after > 0


def test_stops_again_and_again(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    write(source, tmp_path / "whole")
    went_on = []
    for count in (10, 14, 22, 30, 39):
        with pytest.raises(Stopped, match="pairs are kept, the same command goes on from there"):
            write(
                source,
                tmp_path / "out",
                progress=stop_after(count, KeyboardInterrupt),
                say=lambda line: went_on.append(int(line.split()[2])),
            )
    write(source, tmp_path / "out")
    assert went_on == sorted(went_on)
    assert len(went_on) == 4
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_pairs_in_closed_shards_are_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shards import checking

    source = make_source(tmp_path / "in")
    with pytest.raises(Stopped):
        write(source, tmp_path / "out", progress=stop_after(35, KeyboardInterrupt))
    looked_at: list[str] = []
    original = checking.look_at

    def counted(id: str, *rest: Any) -> Any:
        looked_at.append(id)
        return original(id, *rest)

    monkeypatch.setattr(checking, "look_at", counted)
    report = write(source, tmp_path / "out")
    assert len(looked_at) == 40 - report.went_on_after


def test_a_source_that_has_changed_is_written_anew(tmp_path: Path) -> None:
    """A folder is known by its path, so that pictures may change unnoticed by the request."""
    source = make_source(tmp_path / "in")
    with pytest.raises(Stopped):
        write(source, tmp_path / "out", progress=stop_after(35, KeyboardInterrupt))
    (tmp_path / "in" / "002.jpg").write_bytes(jpeg(255))
    said: list[str] = []
    report = write(source, tmp_path / "out", say=said.append)
    assert "no longer gives the pairs that were already written: starting anew" in said[-1]
    assert report.went_on_after == 0
    write(source, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_another_request_drops_what_was_left_and_says_so(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    with pytest.raises(Stopped):
        write(source, tmp_path / "out", progress=stop_after(35, KeyboardInterrupt))
    said: list[str] = []
    report = write(source, tmp_path / "out", check="header", say=said.append)
    assert "an unfinished write of another request was at" in said[0]
    assert report.went_on_after == 0
    assert verify_set(tmp_path / "out").ok
    assert leftovers(tmp_path / "out") == []


def test_too_many_missing_pictures_do_not_cost_what_was_read(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    (tmp_path / "in" / "039.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 pictures are missing.* pairs are kept, the same command goes on"):
        write(source, tmp_path / "out")
    report = write(source, tmp_path / "out", allow_missing=1)
    assert report.went_on_after > 20
    assert report.missing == 1


def test_a_torn_journal_and_files_that_it_does_not_know(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    write(source, tmp_path / "whole")
    with pytest.raises(Stopped):
        write(source, tmp_path / "out", progress=stop_after(35, KeyboardInterrupt))
    work = tmp_path / ".out.writing"
    lines = (work / "journal.jsonl").read_text().splitlines(keepends=True)
    (work / "journal.jsonl").write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    last = json.loads(lines[-1])
    (work / "set" / last["split"] / "shard.00099.mds").write_bytes(b"half a shard")
    report = write(source, tmp_path / "out")
    assert report.went_on_after > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_change_nothing(workers: int, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", 150)
    one = write(source, tmp_path / "one")
    several = write(source, tmp_path / "several", workers=workers)
    assert tree(tmp_path / "one") == tree(tmp_path / "several")
    assert (one.written, one.first_rejected) == (several.written, several.first_rejected)
    assert list(ids_written(tmp_path / "one")) == list(ids_written(tmp_path / "several"))


def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    import multiprocessing

    source = make_source(tmp_path / "in", 400)

    others = multiprocessing.active_children()  # the session's own ranks, which later tests use

    def kill(progress: Progress) -> None:
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()

    with pytest.raises(OSError, match="a worker process died"):
        write(source, tmp_path / "out", workers=2, progress=kill)
    assert verify_after(source, tmp_path / "out")


def verify_after(source: dict[str, str], out: Path) -> bool:
    write(source, out)
    return verify_set(out).ok


CHILD = """
import sys, threading
from pathlib import Path
from shards.writer import write_set
from tests.shards.resume import OPTIONS, SMALL

def stop(progress):
    if progress.done == 35:
        print("there", flush=True)
        threading.Event().wait()

if __name__ == "__main__":
    write_set("pairs", source=sys.argv[1], out=sys.argv[2], options=OPTIONS, format=SMALL, progress=stop, workers=2)
"""


def test_a_second_run_is_refused_while_the_first_lives_and_goes_on_when_it_is_dead(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(tmp_path / "child.py"), source["source"], str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        shards = [path for path in tree(tmp_path / ".out.writing").items() if path[0].endswith(".mds")]
        with pytest.raises(ValueError, match=rf"process {child.pid} on .* is writing .*/out now"):
            write(source, out)
        assert shards
        assert dict(shards).items() <= tree(tmp_path / ".out.writing").items()
    finally:
        child.kill()
        child.wait()
    assert write(source, out).went_on_after > 0
    write(source, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")
    assert leftovers(out) == []


def test_a_set_that_a_killed_run_had_moved_aside_comes_back(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "in"), tmp_path / "out"
    write(source, out)
    before = tree(out)
    (tmp_path / ".out.writing").mkdir()
    out.rename(tmp_path / ".out.writing" / "old")
    assert write(source, out).already_there
    assert tree(out) == before
    assert leftovers(out) == []


@pytest.mark.parametrize("there_before", [False, True])
def test_an_interrupt_before_the_first_shard_is_full_leaves_nothing(there_before: bool, tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "in"), tmp_path / "out"
    if there_before:
        write(source, out)
    with pytest.raises(Stopped, match="not one shard was full yet, nothing is kept"):
        write(source, out, format=ShardFormat(), progress=stop_after(30, KeyboardInterrupt), overwrite=True)
    assert leftovers(out) == []
    assert out.exists() == there_before
    if there_before:
        assert verify_set(out).ok
