"""The MDS files of a set while they are written."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shards.contents import CONTENTS, content_line, content_of
from shards.pair import Pair

if TYPE_CHECKING:
    from streaming import MDSWriter

SETS = Path("data/mds")
"""Where a set goes, and is looked for, when only its name is given."""

COLUMNS = {"id": "str", "image": "bytes", "captions": "json", "meta": "json"}
HASHES = ["xxh64"]
"""Kept in the index of each split; `shards.verify` and the start of a training run compare them."""


class SplitWriters:
    """One MDS writer and list of contents per split, and the lists of what was left out, opened when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mds: dict[str, MDSWriter] = {}
        self._lines: dict[str, IO[str]] = {}
        self._files = ExitStack()

    def write(self, pair: Pair, captions: list[str]) -> None:
        """Append a pair to its split."""
        from streaming import MDSWriter

        writer = self._mds.get(pair.split)
        if writer is None:
            out = str(self._folder / pair.split)
            writer = self._mds[pair.split] = MDSWriter(columns=COLUMNS, out=out, hashes=HASHES)
        writer.write({"id": pair.id, "image": pair.image, "captions": captions, "meta": pair.meta})
        self._append(f"{pair.split}/{CONTENTS}", content_line(content_of(pair.id, pair.image, captions)))

    def note(self, file: str, line: dict[str, Any]) -> None:
        """Append a line to a JSONL file beside the splits."""
        self._append(file, json.dumps(line) + "\n")

    def _append(self, file: str, line: str) -> None:
        if file not in self._lines:
            self._lines[file] = self._files.enter_context((self._folder / file).open("w", encoding="utf-8"))
        self._lines[file].write(line)

    def finish(self) -> None:
        """Write the last shards and the indexes. MDSWriter's own exit would do so after an exception too."""
        for writer in self._mds.values():
            writer.finish()

    def close(self) -> None:
        """Let go of files and threads, whether or not the set was finished."""
        self._files.close()
        for writer in self._mds.values():
            writer.cancel_future_jobs()
