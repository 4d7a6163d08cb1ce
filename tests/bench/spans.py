"""Where the time goes: functions that are timed from outside, while they do what they do."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Spans:
    """Seconds of each part of some work; a part inside another counts in the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, *parts: tuple[Any, str, str]) -> Iterator[None]:
        """Inside, calls of `name` of an owner count as a part: (owner, name, part)."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
        for (owner, name, original), (_, _, part) in zip(originals, parts, strict=True):
            setattr(owner, name, self._timed(original, part))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return call

    def read(self) -> dict[str, float]:
        """The seconds until now, those of a part that is not over included."""
        self._switch()
        return dict(self.seconds)

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
