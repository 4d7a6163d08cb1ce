"""A folder that is made anew is complete or absent, whatever a run before it left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shards.staging import clear_leftovers, staged
from tests.shards.resume import leftovers


def fill(out: Path, text: str, overwrite: bool = True) -> None:
    clear_leftovers(out)
    with staged(out, overwrite) as folder:
        (folder / "file").write_text(text)


def dead_process() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


@pytest.mark.parametrize("there_before", [False, True])
def test_an_interrupt_leaves_what_was_there(there_before: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if there_before:
        fill(out, "old")
    with pytest.raises(TypeError), staged(out, True) as folder:
        (folder / "file").write_text(None)  # type: ignore[arg-type]  # the file is there, half written
    assert leftovers(out) == []
    assert out.exists() == there_before
    assert not there_before or (out / "file").read_text() == "old"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    host = socket.gethostname()
    names = [f".out.{host}.{pid}.0123abcd.new" for pid in (dead_process(), os.getpid())]
    for name in names:
        (tmp_path / name).mkdir()
    fill(tmp_path / "out", "new")
    assert leftovers(tmp_path / "out") == names[1:]
    assert (tmp_path / "out" / "file").read_text() == "new"


def test_what_a_killed_run_had_moved_aside_comes_back(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / f".out.{socket.gethostname()}.{dead_process()}.0123abcd.old")
    clear_leftovers(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert leftovers(tmp_path / "out") == []


def test_another_run_was_faster(tmp_path: Path) -> None:
    fill(tmp_path / "out", "first")
    with pytest.raises(ValueError, match="did another run write it"):
        fill(tmp_path / "out", "second", overwrite=False)
    assert (tmp_path / "out" / "file").read_text() == "first"
