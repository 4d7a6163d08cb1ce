"""A set is complete or absent: interrupts, kills, and runs side by side."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shards.report import Progress
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.conftest import Write, row, siblings
from tests.shards.layouts import jpeg, write_jsonl, write_tree


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("there_before", [False, True])
def test_interrupt_leaves_no_half_set(
    error: type[BaseException], there_before: bool, write: Write, tmp_path: Path
) -> None:
    files = {f"{n}.jpg": jpeg(n) for n in range(6)}
    if there_before:
        write([row("0.jpg")], files)

    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise error

    with pytest.raises(error):
        write([row(name) for name in files], files, progress=interrupt, overwrite=True)
    assert siblings(tmp_path / "out") == []
    assert (tmp_path / "out").exists() == there_before
    if there_before:
        assert verify_set(tmp_path / "out").ok


CHILD = """
import sys, time
from pathlib import Path
from shards.writer import write_set

def stop(progress):
    if progress.done == 3:
        Path(sys.argv[3]).touch()
        time.sleep(60)

write_set("pairs", source=sys.argv[1], out=sys.argv[2], overwrite=True, progress=stop)
"""


def test_killed_run_is_cleared_up_by_the_next_and_a_live_one_is_not(write: Write, tmp_path: Path) -> None:
    files = {f"{n}.jpg": jpeg(n) for n in range(6)}
    rows = [row(name) for name in files]
    write_tree(tmp_path / "in", files)
    source, out, mark = write_jsonl(tmp_path / "in" / "list.jsonl", rows), tmp_path / "out", tmp_path / "mark"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(source), str(out), str(mark)], cwd=Path.cwd())
    try:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(siblings(out)) == 1
        assert not out.exists()
        # While the child lives, another run completes beside it and leaves its folder alone.
        arguments: dict[str, Any] = {"source": str(source), "out": str(out)}
        write_set("pairs", **arguments)
        assert len(siblings(out)) == 1
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert len(siblings(out)) == 1
    assert write_set("pairs", **arguments).already_there
    assert siblings(out) == []
    assert verify_set(out).ok


def test_a_set_that_a_killed_run_had_moved_aside_comes_back(write: Write, tmp_path: Path) -> None:
    write([row("a.jpg")], {"a.jpg": jpeg(1)})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "out").rename(tmp_path / f".out.{socket.gethostname()}.{gone.pid}.0123abcd.old")
    assert write([row("b.jpg")], {"b.jpg": jpeg(2)}, overwrite=True).written == {"train": 1}
    assert siblings(tmp_path / "out") == []
