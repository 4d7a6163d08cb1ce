"""Where a set may be written to: a folder, or an object store."""

from __future__ import annotations

from pathlib import Path

from shards.local import LocalWork
from shards.work import Work


def open_work(out: str) -> Work:
    """The work that writes to a path or a URL.

    Raises:
        ValueError: A URL that cannot be written to, or whose package is not installed.
    """
    from shards.location import location

    place = location(out)
    if isinstance(place, Path):
        return LocalWork(place)
    if out.lower().startswith(("http://", "https://")):
        raise ValueError(f"{out}: nothing can be written to the web; name a folder, or an object store such as s3://")
    from shards.object_store import ObjectWork

    return ObjectWork(out)
