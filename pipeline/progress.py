"""Progress of long work: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shards.report import Progress

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def bar_or_lines(unit: str) -> Iterator[Callable[[Progress], None]]:
    """A function to call with every `Progress`; it draws on stderr, so that output can be piped."""
    if sys.stderr.isatty():
        with _bar(unit) as report:
            yield report
    else:
        yield _lines(unit)


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.wanted)


def _lines(unit: str) -> Callable[[Progress], None]:
    began = last = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            of = f" of {progress.wanted}" if progress.wanted else ""
            rate = progress.done / (now - began)
            print(f"{progress.done}{of} {unit}, {rate:.0f}/s", file=sys.stderr, flush=True)

    return report
