"""Files under a folder, on this machine or elsewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from shards.location import Location, can_list, walk
from shards.names import NotFound, Seen, is_junk, matches_any, not_found, resolve, split_path
from shards.remote.patience import stop_waiting_with

_THREADS = 8
"""Files of a remote folder that are asked for at a time: each answer takes a while, and few bytes."""


class FolderStore:
    """Files under a folder. Wanted files are opened directly, so a folder of millions is not listed for a few.

    A web folder cannot be listed: there a file is only found under the very path that is asked for.
    """

    def __init__(self, root: Location) -> None:
        self.root = root
        self.refusal = ""
        """What a web folder said of a file that it may have and does not give."""

    def read_wanted(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes | NotFound]]:
        """See `shards.store.Store`. The order is the wanted one; absolute and `../` paths are tried as they stand."""
        elsewhere = []
        for name, data in self._read_all(dict.fromkeys(wanted)):
            if data is not None:
                yield name, data
            elif can_list(self.root):
                elsewhere.append(name)
            else:
                yield name, NotFound(f"not at {self.root / name if name else self.root}")
        if not elsewhere:
            return
        basenames = dict.fromkeys(parts[-1] for name in elsewhere if (parts := split_path(name)))
        namesakes = chain.from_iterable(self._by_basename.get(basename, ()) for basename in basenames)
        found, several = resolve(elsewhere, namesakes)
        seen = Seen(self._files)
        for name in elsewhere:
            if name not in found:
                yield name, not_found(several.get(name, ()), self.root, seen)
        for name, (_, data) in zip(found, self._read_listed(found.values()), strict=True):
            yield name, data

    def _read_all(self, names: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """Each name with its file's bytes, or None, in the order asked for; a remote folder is asked a few ahead."""
        if isinstance(self.root, Path):
            yield from ((name, self._read(name)) for name in names)
            return
        waiting: deque[tuple[str, Future[bytes | None]]] = deque()
        stop = threading.Event()
        with ThreadPoolExecutor(_THREADS, initializer=stop_waiting_with, initargs=(stop,)) as threads:
            try:
                for name in names:
                    waiting.append((name, threads.submit(self._read, name)))
                    if len(waiting) > 2 * _THREADS:
                        first, answer = waiting.popleft()
                        yield first, answer.result()
                while waiting:
                    first, answer = waiting.popleft()
                    yield first, answer.result()
            finally:
                stop.set()
                threads.shutdown(cancel_futures=True)

    def _read_listed(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for name, data in self._read_all(names):
            if data is None:
                raise FileNotFoundError(f"{self.root / name} is listed, and cannot be read: was it removed meanwhile?")
            yield name, data

    def _read(self, name: str) -> bytes | None:
        if not name:
            return None
        path = self.root / name.replace("\\", "/")
        if isinstance(path, Path):
            return path.read_bytes() if path.is_file() else None
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

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
        if not can_list(self.root):
            yield from self._named(pattern for pattern in patterns if "*" not in pattern and "?" not in pattern)
            return
        yield from self._read_listed(name for name in self._files if matches_any(name, patterns))

    def _named(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Those files that a web folder gives. Object stores answer "forbidden" for what they do not have, too."""
        for name in names:
            try:
                data = self._read(name)
            except PermissionError as error:
                self.refusal = str(error)
                continue
            if data is not None:
                yield name, data

    def _walk(self) -> Iterator[str]:
        return (name for name in walk(self.root) if not is_junk(name))
