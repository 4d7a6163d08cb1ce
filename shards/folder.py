"""Files under a folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from shards.names import NotFound, is_junk, matches_any, natural_key, not_found, resolve


class FolderStore:
    """Files under a folder. Wanted files are opened directly, so a folder of millions is not listed for a few."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """See `shards.store.Store`. The order is the wanted one; absolute and `../` paths are tried as they stand."""
        elsewhere = []
        for name in dict.fromkeys(wanted):
            path = self.root / name.replace("\\", "/")
            if name and path.is_file():
                yield name, path.read_bytes()
            else:
                elsewhere.append(name)
        if not elsewhere:
            return
        members = list(self._walk())
        found, several = resolve(elsewhere, members)
        for name in elsewhere:
            if name in found:
                yield name, (self.root / found[name]).read_bytes()
            else:
                yield name, not_found(several.get(name, ()), self.root, members)

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """See `shards.store.Store`. The order is by name, numbers by value."""
        for name in self._walk():
            if matches_any(name, patterns):
                yield name, (self.root / name).read_bytes()

    def _walk(self) -> Iterator[str]:
        for folder, subfolders, files in os.walk(self.root, followlinks=True):
            subfolders.sort(key=natural_key)
            for file in sorted(files, key=natural_key):
                name = (Path(folder) / file).relative_to(self.root).as_posix()
                if not is_junk(name):
                    yield name
