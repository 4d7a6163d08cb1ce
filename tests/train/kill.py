"""A child process that is killed at the n-th call that changes the disk."""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# `Path.open` and `tempfile` take io's name for the builtin.
_CALLS = (
    (builtins, "open"),
    (io, "open"),
    (os, "open"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
)
_MORE = ((os, "rmdir"), (os, "mkdir"))


def run_killed(action: Callable[[], None], deadline: int, writers: Sequence[tuple[Any, str]] = ()) -> int:
    """Run an action in a forked child that gets SIGKILL at the `deadline`-th such call; -1 never kills.

    Args:
        action: what is done.
        deadline: counted from 1.
        writers: (module, name) of functions (value, path) that write a file by means that cannot be counted; killed
            there, they leave half of it.

    Returns:
        The number of calls, or minus the signal that ended the child.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[str] = []
        for module, name in (*_CALLS, *_MORE):
            setattr(module, name, _counted(getattr(module, name), name, calls, deadline))
        for module, name in writers:
            setattr(module, name, _counted(getattr(module, name), name, calls, deadline, halves=True))
        status = 1
        try:
            action()
            os.write(write, str(len(calls)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    assert answer, "the child failed; see its traceback"
    return int(answer)


def _counted(
    function: Callable[..., Any], name: str, calls: list[str], deadline: int, halves: bool = False
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        due = len(calls) == deadline
        if due and halves:
            function(*args, **kwargs)
            os.truncate(args[1], Path(args[1]).stat().st_size // 2)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call
