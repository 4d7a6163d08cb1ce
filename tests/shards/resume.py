"""A source of generated pairs for tests of stops and restarts, with the faults that a source has."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from shards.mds import ShardFormat
from tests.shards.layouts import jpeg, write_jsonl, write_tree

SMALL = ShardFormat(size_limit=6000)
"""A few pairs of `make_source` fill a shard."""


def make_source(folder: Path, count: int = 40) -> dict[str, str]:
    """Arguments of `write_set` for `count` rows of two splits, with pictures that are broken or come twice."""
    rows, files = [], {}
    for number in range(count):
        name = f"{number:03}.jpg"
        files[name] = b"no picture" if number % 11 == 5 else jpeg(number * 5 % 256)
        split = "val" if number % 7 == 3 else "train"
        captions = [f"caption {number} " + "x" * random.Random(number).randrange(200), " "]
        rows.append({"image": name, "caption": captions, "part": split})
    write_tree(folder, files)
    return {"name": "pairs", "source": str(write_jsonl(folder / "list.jsonl", rows))}


OPTIONS = {"split_key": "part"}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ids_written(folder: Path) -> Iterator[str]:
    """The ids of a set, out of its lists of contents."""
    for path in sorted(folder.glob("*/contents.jsonl")):
        yield from (json.loads(line)["id"] for line in path.read_text().splitlines())


def leftovers(out: Path) -> list[str]:
    """What lies hidden beside a set."""
    return sorted(name for name in os.listdir(out.parent) if name.startswith("."))
