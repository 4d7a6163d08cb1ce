"""streaming's shared memory: two runs on one machine do not get in each other's way, and a dead one leaves nothing.

streaming names its segments by a number (`000003_locals`), takes the first that is free, and two runs that look at the
same moment take the same one. Here one run at a time builds its datasets, and then notes which number it uses in a file
that it keeps locked: the system drops the lock when the process ends, however it ends. The segments of a number that
was noted and that nobody holds any more are removed by the next run; streaming's own `clean_stale_shared_memory` would
remove those of live runs as well.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import torch.distributed as dist
from streaming import StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN

T = TypeVar("T", bound=StreamingDataset)

SHM = Path("/dev/shm")
_WAIT_S = 300.0
_held: list[IO[str]] = []  # open, and so locked, until this process ends


def build_dataset(build: Callable[[], T]) -> T:
    """Build a streaming dataset on every rank, one run of this user on this machine at a time.

    Args:
        build: makes it.

    Raises:
        TimeoutError: another run has been building for minutes.
    """
    is_local_main = os.environ.get("LOCAL_RANK", "0") == "0"
    with _alone(is_local_main):
        if is_local_main:
            remove_dead()
        if dist.is_initialized():
            dist.barrier()
        dataset = build()
        if is_local_main:
            _hold(f"{dataset._shm_prefix_int:06}")
        if dist.is_initialized():
            dist.barrier()
    return dataset


def remove_dead() -> list[str]:
    """Remove segments of this user's dead runs; gives their names. Call it while no other run builds."""
    removed = []
    notes = sorted(_folder().glob("[0-9]*.*"))
    live = {note.name.split(".")[0] for note in notes if _is_locked(note)}
    for note in notes:
        prefix = note.name.split(".")[0]
        if prefix not in live and note.read_text(encoding="utf-8") == _identity(prefix):
            for name in (*SHM_TO_CLEAN, BARRIER_FILELOCK, CACHE_FILELOCK):
                for place in (SHM / f"{prefix}_{name}", Path(tempfile.gettempdir()) / f"{prefix}_{name}"):
                    if place.exists():
                        place.unlink()
                        removed.append(place.name)
        if not _is_locked(note):
            note.unlink()
    return removed


def _hold(prefix: str) -> None:
    """Note that this process uses the segments of a number, for as long as it lives."""
    file = (_folder() / f"{prefix}.{os.getpid()}").open("w", encoding="utf-8")
    if _try_lock(file):  # else this process holds it for an earlier dataset
        _held.append(file)
    file.write(_identity(prefix))
    file.flush()


def _identity(prefix: str) -> str:
    """Tells the segments of a number from those that another program has made under the same number since."""
    try:
        return str((SHM / f"{prefix}_{LOCALS}").stat().st_ino)
    except FileNotFoundError:
        return ""


def _is_locked(path: Path) -> bool:
    with path.open("r", encoding="utf-8") as file:
        return not _try_lock(file)


@contextmanager
def _alone(is_local_main: bool) -> Iterator[None]:
    """Wait until no other run of this user builds; the other ranks of this one wait at the first barrier."""
    if not is_local_main:
        yield
        return
    deadline = time.monotonic() + _WAIT_S
    with (_folder() / "building").open("w", encoding="utf-8") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another run has held {file.name} for {_WAIT_S:.0f} s: is it stopped? end it")
            time.sleep(0.1)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    """For this user; beside streaming's own file locks."""
    folder = Path(tempfile.gettempdir()) / f"hn-clip-runs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
