"""A folder that is complete or absent: written aside, synced to disk, renamed into place.

For what is made anew after a kill, such as a bundle or an index; a set of shards goes on instead: see `shards.work`.

Beside `<out>` lie, while a run works, `.<out>.<host>.<pid>.<random>.new` (being written) and `.old` (about to be
replaced). A run that is killed leaves them; the next one on that host, finding the process gone, clears them up.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes `out` when the block ends well, and vanishes when it does not.

    Args:
        out: The folder to publish. Its parent is made.
        overwrite: Whether a folder that is there may be replaced; it stays whole until the new one is.

    Raises:
        ValueError: Another run published `out` meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{out.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    new, old = out.with_name(f"{stem}.new"), out.with_name(f"{stem}.old")
    new.mkdir()
    try:
        yield new
        sync_tree(new)
        if overwrite and out.exists():
            os.rename(out, old)
        try:
            os.rename(new, out)
        except OSError as error:
            raise ValueError(f"{out} cannot be published ({error.strerror}): did another run write it?") from error
        sync(out.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(out: Path) -> None:
    """Remove what killed runs of this host left beside `out`; bring back a set that one of them had moved aside."""
    pattern = re.compile(
        rf"\.{re.escape(out.name)}\.{re.escape(socket.gethostname())}\.(\d+)\.[0-9a-f]{{8}}\.(new|old)"
    )
    for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.*")):
        match = pattern.fullmatch(path.name)
        if match is None or _alive(int(match.group(1))):
            continue
        if match.group(2) == "old" and not out.exists():
            os.rename(path, out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process
    return True


def sync_tree(folder: Path) -> None:
    """Flush every file, then every folder that names it: a rename may otherwise reach the disk before its contents."""
    for root, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(root) / file)
        sync(Path(root))


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
