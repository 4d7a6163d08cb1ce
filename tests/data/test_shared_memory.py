"""Runs side by side on one machine, and after one that was killed: real processes, a temporary folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data import shared_memory

RUN = """
import sys
from pathlib import Path
from tests.data.reading import read_epoch, training_data
print("ready", flush=True)
sys.stdin.readline()
data = training_data(Path(sys.argv[1]), batch_size=8)
print(f"{data.dataset._shm_prefix_int:06}", flush=True)
for line in sys.stdin:
    print(sum(len(batch) for batch in read_epoch(data, int(line))), flush=True)
"""

BUILDER = """
import sys, time
from pathlib import Path
from tests.data.reading import PREPROCESS, Utf8
from pipeline.data.loader import PairDataset
from pipeline.data.shared_memory import build_dataset
from pipeline.sections import AugmentConfig, CaptionConfig
name, split, log, wait_for = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]

def note(what):
    with log.open("a") as file:
        file.write(f"{name} {what}\\n")

def build():
    note("enters")
    while not all(f"{other} comes" in log.read_text() for other in wait_for):
        time.sleep(0.05)
    dataset = PairDataset(split, PREPROCESS, 8, 1, CaptionConfig(), AugmentConfig())
    note("leaves")
    return dataset

if not wait_for:
    while "first enters" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.05)
    note("comes")
print(build_dataset(build)._shm_prefix_int)
"""


class Process:
    """A run in a process group of its own."""

    def __init__(self, code: str, *arguments: str, temporary: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, line: str = "") -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def kill(self) -> None:
        """Everything at once, so that Python's tracker of resources cannot tidy up."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def end(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        assert self.popen.wait(timeout=120) == 0


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder, whose dead runs' segments are removed at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    code = "from pipeline.data.shared_memory import remove_dead; remove_dead()"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(folder)},
        check=True,
    )


def _segments(prefix: str) -> set[str]:
    return {path.name for path in shared_memory.SHM.glob(f"{prefix}_*")}


def test_a_killed_run_leaves_nothing_to_the_next_and_a_live_one_keeps_its_own(tiny_set: Path, temporary: Path) -> None:
    split = str(tiny_set / "train")
    processes = [Process(RUN, split, temporary=temporary) for _ in range(3)]
    live, killed, following = processes
    try:
        assert [process.hear() for process in processes] == ["ready"] * 3
        live_prefix, killed_prefix = live.ask(), killed.ask()
        assert live_prefix != killed_prefix
        assert (live.ask("0"), killed.ask("0")) == ("64", "64")
        killed.kill()
        assert f"{killed_prefix}_locals" in _segments(killed_prefix)
        before = _segments(live_prefix)
        assert following.ask() == killed_prefix, "the number is free again"
        assert following.ask("0") == "64"
        assert _segments(live_prefix) == before
        assert live.ask("1") == "64"
        live.end()
        following.end()
    finally:
        for process in processes:
            process.kill()


def test_one_run_at_a_time_builds(tiny_set: Path, temporary: Path) -> None:
    """The second comes while the first is inside."""
    log = temporary / "log"
    split = str(tiny_set / "train")
    first = Process(BUILDER, "first", split, str(log), "second", temporary=temporary)
    second = Process(BUILDER, "second", split, str(log), temporary=temporary)
    try:
        numbers = [process.hear() for process in (first, second)]
        assert all(number.isdigit() for number in numbers)
    finally:
        for process in (first, second):
            process.popen.wait(timeout=120)
    expected = ["first enters", "second comes", "first leaves", "second enters", "second leaves"]
    assert log.read_text().splitlines() == expected


def test_segments_that_another_program_made_under_the_number_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(shared_memory, "SHM", shm)
    monkeypatch.setattr(shared_memory.tempfile, "tempdir", str(temporary))
    notes = shared_memory._folder()
    for prefix in ("000001", "000002", "000003"):
        (shm / f"{prefix}_locals").touch()
        (shm / f"{prefix}_resume").touch()
    (notes / "000001.77").write_text(shared_memory._identity("000001"))  # of a dead run
    (notes / "000002.78").write_text("12345")  # of a dead run, whose segments are gone: these are another program's
    assert sorted(shared_memory.remove_dead()) == ["000001_locals", "000001_resume"]
    assert sorted(path.name for path in shm.iterdir()) == [
        f"{prefix}_{name}" for prefix in ("000002", "000003") for name in ("locals", "resume")
    ]
    assert list(notes.glob("0*")) == []
