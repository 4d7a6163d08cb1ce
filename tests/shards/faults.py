"""Killing a process at its n-th call that changes the disk."""

from __future__ import annotations

import builtins
import io
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

_CALLS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "truncate", "link", "ftruncate", "pwrite")


def run_until(deadline: int, action: Callable[[], object]) -> int:
    """Run in a child that is killed at its `deadline`-th call; the number of calls, or minus the signal's number."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            counter = _Counter(deadline)
            counter.install()
            action()
            os.write(write, str(counter.calls).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(answer)


class _Counter:
    """Counts calls of all threads. A write that is killed has written half."""

    def __init__(self, deadline: int) -> None:
        self.calls = 0
        self._deadline = deadline
        self._lock = threading.Lock()

    def install(self) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        opened = builtins.open
        builtins.open = io.open = self._opening(opened)  # type: ignore[assignment]

    def is_due(self) -> bool:
        with self._lock:
            self.calls += 1
            return self.calls == self._deadline

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_due():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return function(file, mode, *args, **kwargs)
            if self.is_due():
                os.kill(os.getpid(), signal.SIGKILL)
            return _Writing(function(file, mode, *args, **kwargs), self)

        return call


class _Writing:
    """A file that is open for writing."""

    def __init__(self, file: Any, counter: _Counter) -> None:
        self._file = file
        self._counter = counter

    def write(self, data: Any) -> Any:
        if self._counter.is_due():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._file.write(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
