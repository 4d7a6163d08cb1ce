"""How long a lost connection is waited for: bounded tries, growing pauses with jitter, one line on stderr for each.

PIPELINE_HTTP_TRIES      attempts in a row that bring nothing before it is an error (8)
PIPELINE_HTTP_TIMEOUT    seconds without a byte after which a connection counts as lost (60)
PIPELINE_HTTP_BACKOFF    seconds before the second try; they double with each further one, up to 60 (1)
"""

from __future__ import annotations

import os
import random
import sys
import threading
from dataclasses import dataclass

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that another try may cure."""

LONGEST_PAUSE = 60.0
LONGEST_OBEYED = 600.0
"""Seconds. A server that asks for more (Retry-After) is asked again by the user, not by a sleeping process."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tries in a row without a byte, seconds of silence that count as a lost connection, and the first pause."""

    tries: int = 8
    timeout: float = 60.0
    backoff: float = 1.0

    @classmethod
    def from_environment(cls) -> Limits:
        """The defaults, or what the environment says.

        Raises:
            ValueError: A variable holds no positive number.
        """
        return cls(
            int(_number("PIPELINE_HTTP_TRIES", cls().tries)),
            _number("PIPELINE_HTTP_TIMEOUT", cls().timeout),
            _number("PIPELINE_HTTP_BACKOFF", cls().backoff),
        )


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0 or (name.endswith("TRIES") and value < 1):
        raise ValueError(f"{name} is {text!r}, not a positive number")
    return value


_thread = threading.local()


class Patience:
    """The tries left for one file. What brings bytes is no failure, so a line that drops every minute still ends."""

    def __init__(self, what: str, limits: Limits) -> None:
        self._what = what
        self._limits = limits
        self._failures = 0

    def renew(self) -> None:
        """Bytes have come: all tries are there again."""
        self._failures = 0

    def wait(self, reason: str, ask_again_after: float | None = None) -> None:
        """Count a failure, say what it was, and sleep before the next try.

        Args:
            reason: What happened, in a few words.
            ask_again_after: Seconds that the server asked to wait.

        Raises:
            ConnectionError: No tries are left, the server asks for a longer pause than anybody waits, or nobody waits.
        """
        self._failures += 1
        if self._failures >= self._limits.tries:
            raise ConnectionError(
                f"{self._what}: {reason}; given up after {self._failures} tries. Check the connection and run again"
            )
        if ask_again_after is not None and ask_again_after > LONGEST_OBEYED:
            raise ConnectionError(
                f"{self._what}: {reason}; it asks to come back in {ask_again_after:.0f} s: run again then"
            )
        pause = min(self._limits.backoff * 2 ** (self._failures - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5)
        pause = max(pause, ask_again_after or 0.0)
        say(f"{self._what}: {reason}; try {self._failures + 1} of {self._limits.tries} in {pause:.1f} s")
        if _stop_of_thread().wait(pause):
            raise ConnectionError(f"{self._what}: {reason}; nobody waits for it any more")


def stop_waiting_with(stop: threading.Event) -> None:
    """In a thread that others wait for: its pauses end when `stop` is set, and no other try follows.

    Ctrl-C is raised in the main thread alone, where it ends a pause by itself.
    """
    _thread.stop = stop


def _stop_of_thread() -> threading.Event:
    if not hasattr(_thread, "stop"):
        _thread.stop = threading.Event()
    stop: threading.Event = _thread.stop
    return stop


def say(line: str) -> None:
    """One line on stderr, where progress goes."""
    print(line, file=sys.stderr, flush=True)
