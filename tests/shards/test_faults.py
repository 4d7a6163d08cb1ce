"""What happens to a write whose process is killed anywhere, and on a disk that is full."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shards.mds import ShardFormat
from shards.merge import merge_parts
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.faults import as_nobody, run_until, with_full_disk, with_small_disk
from tests.shards.resume import OPTIONS, SMALL, ids_written, leftovers, make_source, tree
from tests.shards.test_parts import write_parts


def write(source: dict[str, str], out: Path, **more: Any) -> Any:
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, **source, **more}
    return write_set(out=str(out), **arguments)


def check_kills(results: list[int], calls: int) -> None:
    """Nearly every run of a sweep was killed: how many calls there are depends a little on which thread is first."""
    assert set(results) <= {-signal.SIGKILL, *range(1, calls + 1)}
    assert results.count(-signal.SIGKILL) >= 0.95 * calls


@pytest.mark.long
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_call_the_next_run_gives_the_whole_set(replaces: bool, tmp_path: Path) -> None:
    """Every pair once, byte for byte as without a kill; until then, what was there before, or nothing."""
    source = make_source(tmp_path / "in", 30)
    new, old = tmp_path / "new" / "out", tmp_path / "old" / "out"
    write(source, new)
    write(source, old, format=ShardFormat(size_limit=4000))
    whole = tree(new)
    went_on, results = [], []

    def fresh(number: int) -> Path:
        out = tmp_path / f"killed-{number}" / "out"
        if replaces:
            shutil.copytree(old, out)
        return out

    calls = run_until(-1, partial(write, source, fresh(0), overwrite=replaces))
    assert calls > 100
    for deadline in range(1, calls + 1):
        out = fresh(deadline)
        results.append(run_until(deadline, partial(write, source, out, overwrite=replaces)))
        if out.exists():
            assert tree(out) in ((tree(old), whole) if replaces else (whole,))
        report = write(source, out, overwrite=replaces)
        assert tree(out) == whole, deadline
        assert leftovers(out) == [], deadline
        went_on.append(report.went_on_after)
        shutil.rmtree(out.parent)
    check_kills(results, calls)
    assert max(went_on) > 20
    assert max(Counter(ids_written(new)).values()) == 1


@pytest.mark.long
@pytest.mark.parametrize("linked", [True, False])
def test_a_merge_killed_at_any_call_is_done_by_the_next(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged set, and parts that nobody has touched: its shards are those of the parts where they can be linked."""
    if not linked:
        monkeypatch.setattr(os, "link", refuse_link)
    parts = write_parts(tmp_path, 3, **make_source(tmp_path / "in", 30))
    before = [tree(Path(part)) for part in parts]
    merge_parts(str(tmp_path / "whole" / "out"), parts)
    whole = tree(tmp_path / "whole" / "out")
    results = []
    calls = run_until(-1, partial(merge_parts, str(tmp_path / "killed-0" / "out"), parts))
    assert calls > 100
    for deadline in range(1, calls + 1):
        out = tmp_path / f"killed-{deadline}" / "out"
        results.append(run_until(deadline, partial(merge_parts, str(out), parts)))
        assert not out.exists() or tree(out) == whole
        merge_parts(str(out), parts)
        assert tree(out) == whole, deadline
        assert leftovers(out) == [], deadline
        shutil.rmtree(out.parent)
    check_kills(results, calls)
    assert [tree(Path(part)) for part in parts] == before


def refuse_link(*_: Any) -> None:
    """A file system without links."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.long
def test_a_disk_that_is_full_from_any_call_on(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", 30)
    write(source, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    calls = run_until(-1, partial(write, source, tmp_path / "free" / "out"))
    said: list[str] = []
    for first in range(1, calls + 1):
        out = tmp_path / f"full-{first}" / "out"
        try:
            with_full_disk(first, partial(write, source, out))
        except OSError as error:
            said.append(str(error))
        assert not out.exists() or tree(out) == whole
        write(source, out)
        assert tree(out) == whole, first
        assert leftovers(out) == [], first
        shutil.rmtree(out.parent)
    assert len(said) > 0.8 * calls, "at the end, files are only renamed and removed"
    place = rf"{tmp_path}/full-\d+/out cannot be written: No space left on device(; \d+ pairs are kept, .*)?"
    assert [line for line in said if not re.fullmatch(place, line)] == []
    assert any("pairs are kept" in line for line in said)


def test_a_full_disk_is_said_and_what_was_complete_stays(tmp_path: Path) -> None:
    source, disk = make_source(tmp_path / "in", 200), tmp_path / "disk"
    disk.mkdir()

    def fill_and_go_on() -> tuple[str, int, dict[str, bytes]]:
        try:
            write(source, disk / "out")
        except OSError as error:
            said = str(error)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        return said, write(source, disk / "out").went_on_after, tree(disk / "out")

    said, went_on_after, files = with_small_disk(disk, 128, fill_and_go_on)
    assert re.search(r"disk/out cannot be written: No space left on device; [\d,]+ pairs are kept", said)
    assert went_on_after > 0
    write(source, tmp_path / "whole")
    assert files == tree(tmp_path / "whole")


def test_a_place_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    closed = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are for its user alone
    try:
        shutil.copytree(tmp_path / "in", closed / "in")
        closed.chmod(0o555)
        source["source"] = str(closed / "in" / "list.jsonl")
        with pytest.raises(PermissionError, match=rf"Permission denied: '{closed}/"):
            as_nobody(partial(write, source, closed / "out"))
    finally:
        closed.chmod(0o755)
        shutil.rmtree(closed)


CLI = """
import os, signal, sys
from contextlib import contextmanager
from pipeline import cli, progress

number = getattr(signal, sys.argv.pop())

@contextmanager
def signalled(unit):
    def report(step):
        if step.done == 35:
            os.kill(os.getpid(), number)
    yield report

progress.bar_or_lines = signalled
cli.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stopped_command_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    words = ["shards", "write", "pairs", "--source", source["source"], "--out", str(tmp_path / "out")]
    words += ["--option", "split_key=part", "--shard-size", "0.006"]
    done = subprocess.run([sys.executable, "-c", CLI, *words, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].endswith("pairs are kept, the same command goes on from there")
    assert len(done.stderr.splitlines()) == 1
    again = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *words], capture_output=True, text=True, timeout=120, check=True
    )
    assert "going on: " in again.stderr
    assert verify_set(tmp_path / "out").ok


def test_a_place_that_cannot_be_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write(make_source(tmp_path / "in"), tmp_path / "file" / "out")
