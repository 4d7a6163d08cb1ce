"""One run at a time: a folder that a process holds for as long as it lives."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FolderLock:
    """A lock on a folder, which is made for it. The kernel drops it with the process, however that ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor

    @classmethod
    def take(cls, folder: Path, what: str) -> FolderLock:
        """Hold the folder.

        Raises:
            ValueError: Another run holds it; the message names its process and `what` it is at.
            OSError: The folder cannot be made.
        """
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # its holder has just ended and removed the folder
            if _lock(descriptor, what) and _is_at(folder / _LOCK, descriptor):
                try:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                except OSError:
                    os.close(descriptor)
                    raise
                return cls(folder, descriptor)
            os.close(descriptor)

    def release(self) -> None:
        """Let go. A folder in which nothing else lies is removed."""
        if {path.name for path in self.folder.iterdir()} <= {_LOCK}:
            (self.folder / _LOCK).unlink(missing_ok=True)
            self.folder.rmdir()
        os.close(self._descriptor)


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Be the only process inside for this file, which is made and stays; others wait for their turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _lock(descriptor: int, what: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise ValueError(f"{owner} is writing {what} now: wait for it, or stop it, or choose another out") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        # A file system without locks is used as it is: refusing to write there would help nobody.
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at `path`: its last holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
