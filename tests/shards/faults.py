"""A kill, or a full disk, at the n-th call that changes the disk; and children with other disks, and other users."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

_CALLS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "truncate", "link", "ftruncate", "pwrite")
_NEED_SPACE = {"open", "fsync", "mkdir", "link", "pwrite"}
_NOBODY = 65534
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # linux/sched.h


def run_until(deadline: int, action: Callable[[], object]) -> int:
    """Run in a child that is killed at its `deadline`-th call; the number of calls, or minus the signal's number."""

    def count() -> int:
        counter = _Counter(deadline)
        counter.install()
        action()
        return counter.calls

    found: int = apart(count)
    return found


def with_full_disk(first: int, action: Callable[[], object]) -> Any:
    """What the action gives or raises in a child whose disks are full from its `first`-th call on."""

    def run() -> object:
        _Counter(first, is_full=True).install()
        return action()

    return apart(run)


def as_nobody(action: Callable[[], object]) -> Any:
    """What the action gives or raises in a child of a user who is not root: this one, or nobody."""

    def run() -> object:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        return action()

    return apart(run)


def with_small_disk(place: Path, kilobytes: int, action: Callable[[], object]) -> Any:
    """What the action gives or raises in a child for which a small tmpfs lies at `place`. Skips where none may be made.

    Root and other users alike: the mounts are the child's own.
    """

    def run() -> object:
        user, group = os.geteuid(), os.getegid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_MOUNTS | (_NEW_USERS if user else 0)) != 0:
            raise _RefusedError(os.strerror(ctypes.get_errno()))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]):
            done = subprocess.run(["mount", *words], capture_output=True, text=True)
            if done.returncode != 0:
                raise _RefusedError(done.stderr)
        return action()

    try:
        return apart(run)
    except _RefusedError as refused:
        pytest.skip(f"no disk can be mounted here: {refused}")


class _RefusedError(Exception):
    """The machine lets nobody mount anything."""


def apart(action: Callable[[], object]) -> Any:
    """What the action gives or raises in a child process; minus the signal's number where that was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        give = os.fdopen(write, "wb")
        try:
            try:
                answer = pickle.dumps((action(), None))
            except BaseException as error:
                answer = pickle.dumps((None, error))
            give.write(answer)
            give.flush()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    given, error = pickle.loads(answer)
    if error is not None:
        raise error
    return given


class _Counter:
    """Counts calls of all threads. A write that is killed has written half; so has one to a disk that is full."""

    def __init__(self, deadline: int, is_full: bool = False) -> None:
        self.calls = 0
        self._deadline = deadline
        self._is_full = is_full
        self._lock = threading.Lock()

    def install(self) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        opened = builtins.open
        builtins.open = io.open = self._opening(opened)  # type: ignore[assignment]

    def call(self, needs_space: bool, before: Callable[[], object] = lambda: None) -> None:
        """Count a call; where it is the one, or needs space and the disk is full, do `before` and end it."""
        with self._lock:
            self.calls += 1
            due = needs_space and self.calls >= self._deadline if self._is_full else self.calls == self._deadline
        if due:
            before()
            if not self._is_full:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.call(name in _NEED_SPACE)
            return function(*args, **kwargs)

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return function(file, mode, *args, **kwargs)
            self.call(True)
            return _Writing(function(file, mode, *args, **kwargs), self)

        return call


class _Writing:
    """A file that is open for writing."""

    def __init__(self, file: Any, counter: _Counter) -> None:
        self._file = file
        self._counter = counter

    def write(self, data: Any) -> Any:
        self._counter.call(True, lambda: self._write_half(data))
        return self._file.write(data)

    def _write_half(self, data: Any) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
