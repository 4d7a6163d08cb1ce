"""Whether the process that says it is running a run still is. No torch."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

_SECONDS_APART = 2.0  # the start of a process is known to a hundredth of a second, the machine's to about one


def this_process() -> dict[str, Any]:
    """What tells this process from all others: host, pid, and when it began, in seconds since 1970."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}


def is_here(process: Any) -> bool:
    """Whether a process, as `this_process` described it, is on this host and has not ended."""
    return isinstance(process, dict) and process.get("host") == socket.gethostname() and not is_gone(process)


def is_gone(process: Any) -> bool:
    """Whether a process, as `this_process` described it, has ended. What runs on another host may still be there.

    A process of the same number that began at another time is another one.
    """
    try:
        host, pid, began = str(process["host"]), int(process["pid"]), float(process["began"])
    except (KeyError, TypeError, ValueError):
        return False
    if host != socket.gethostname():
        return False
    try:
        found = psutil.Process(pid)
        return found.status() == psutil.STATUS_ZOMBIE or abs(found.create_time() - began) > _SECONDS_APART
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:  # it is there, and another user's
        return False
