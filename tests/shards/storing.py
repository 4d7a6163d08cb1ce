"""Writing the source of `resume` to any place, and stopping it."""

from __future__ import annotations

from typing import Any

from shards.report import Progress
from shards.writer import write_set
from tests.shards.resume import OPTIONS, SMALL
from tests.shards.s3 import BUCKET

OUT = f"s3://{BUCKET}/sets/mine"


def write(source: dict[str, str], out: str, **more: Any) -> Any:
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, **source, **more}
    return write_set(out=out, **arguments)


def stop_after(count: int) -> Any:
    """Ctrl-C after so many items."""

    def stop(progress: Progress) -> None:
        if progress.done == count:
            raise KeyboardInterrupt

    return stop
