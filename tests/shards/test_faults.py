"""What happens to a write whose process is killed anywhere, and on a disk that is full."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shards.mds import ShardFormat
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.faults import run_until
from tests.shards.resume import OPTIONS, SMALL, ids_written, leftovers, make_source, tree


def write(source: dict[str, str], out: Path, **more: Any) -> Any:
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, **source, **more}
    return write_set(out=str(out), **arguments)


@pytest.mark.long
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_call_the_next_run_gives_the_whole_set(replaces: bool, tmp_path: Path) -> None:
    """Every pair once, byte for byte as without a kill; until then, what was there before, or nothing."""
    source = make_source(tmp_path / "in", 30)
    new, old = tmp_path / "new" / "out", tmp_path / "old" / "out"
    write(source, new)
    write(source, old, format=ShardFormat(size_limit=4000))
    whole = tree(new)
    went_on = []

    def fresh(number: int) -> Path:
        out = tmp_path / f"killed-{number}" / "out"
        if replaces:
            shutil.copytree(old, out)
        return out

    calls = run_until(-1, partial(write, source, fresh(0), overwrite=replaces))
    assert calls > 150
    for deadline in range(1, calls + 1):
        out = fresh(deadline)
        assert run_until(deadline, partial(write, source, out, overwrite=replaces)) in (-signal.SIGKILL, calls)
        if out.exists():
            assert tree(out) in ((tree(old), whole) if replaces else (whole,))
        report = write(source, out, overwrite=replaces)
        assert tree(out) == whole, deadline
        assert leftovers(out) == [], deadline
        went_on.append(report.went_on_after)
        shutil.rmtree(out.parent)
    assert max(went_on) > 20
    assert max(Counter(ids_written(new)).values()) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_said_and_what_was_complete_stays(small_disk: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", 200)
    with pytest.raises(OSError, match=r"disk/out cannot be written: No space left on device; [\d,]+ pairs are kept"):
        write(source, small_disk / "out")
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert write(source, small_disk / "out").went_on_after > 0
    write(source, tmp_path / "whole")
    assert tree(small_disk / "out") == tree(tmp_path / "whole")


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
