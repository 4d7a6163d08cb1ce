"""Files under a folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from shards.names import NotFound, is_junk, matches_any, natural_key, not_found, resolve, split_path


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
        basenames = dict.fromkeys(parts[-1] for name in elsewhere if (parts := split_path(name)))
        namesakes = chain.from_iterable(self._by_basename.get(basename, ()) for basename in basenames)
        found, several = resolve(elsewhere, namesakes)
        for name in elsewhere:
            if name in found:
                yield name, (self.root / found[name]).read_bytes()
            else:
                yield name, not_found(several.get(name, ()), self.root, self._files)

    @cached_property
    def _files(self) -> list[str]:
        """Every file. Walked once, however often names are looked for: a set may be read in many small portions."""
        return list(self._walk())

    @cached_property
    def _by_basename(self) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for file in self._files:
            files.setdefault(split_path(file)[-1], []).append(file)
        return files

    def first_names(self, count: int) -> list[str]:
        """See `shards.store.Store`."""
        return list(islice(self._walk(), count))

    def iter_files(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """See `shards.store.Store`. The order is by name, numbers by value."""
        for name in self._files:
            if matches_any(name, patterns):
                yield name, (self.root / name).read_bytes()

    def _walk(self) -> Iterator[str]:
        for folder, subfolders, files in os.walk(self.root, followlinks=True):
            subfolders.sort(key=natural_key)
            for file in sorted(files, key=natural_key):
                name = (Path(folder) / file).relative_to(self.root).as_posix()
                if not is_junk(name):
                    yield name
