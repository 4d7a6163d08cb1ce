"""A set that is written to an object store: each shard goes there when it is full, and does not stay here.

    <url>/.writing/<request>/request.json           what is being written, from the beginning
    <url>/.writing/<request>/train/<shard>.json     a closed shard, which is there, and its lines of the contents
    <url>/train/shard.00000.mds ...
    <url>/train/contents.jsonl, then train/index.json, then manifest.json; then .writing goes

So nothing can be read before it is complete, and a run on any machine can go on. Only runs on one machine keep out of
each other's way: object stores have no locks.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from shards.contents import CONTENTS
from shards.index import INDEX
from shards.location import Location
from shards.mds import ClosedShard, stored
from shards.names import natural_key
from shards.receipt import MANIFEST, Receipt, parse_receipt
from shards.remote.filesystem import FsspecPath, open_filesystem, without_password
from shards.work import Specs, Work

_WRITING = ".writing"
_REQUEST = "request.json"
_THREADS = 8
"""Entries of a journal that are asked for at a time: each answer takes a while, and few bytes."""


class ObjectWork(Work):
    """A set behind a URL that fsspec can write to: s3://, gs://, memory://."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        key = xxhash.xxh3_64_hexdigest(self._url.encode())
        home = Path(tempfile.gettempdir()) / f"hn-clip-{os.getuid()}" / f"{key}.writing"
        disk = f"the temporary folder {tempfile.gettempdir()} (TMPDIR names another)"
        super().__init__(without_password(self._url), home, home / "set", disk)
        self._fs = open_filesystem(self._url)
        self._root = str(self._fs._strip_protocol(self._url))
        self._journal = ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """See `Work`. Nothing stays on this machine."""
        with super().held():
            try:
                yield
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)

    def existing(self) -> Receipt | None:
        """See `Work`."""
        files = self._files()
        if MANIFEST in files:
            return parse_receipt(self._cat(MANIFEST), f"{self.where}/{MANIFEST}")
        if files and not any(name.startswith(f"{_WRITING}/") for name in files):
            raise ValueError(f"{self.where} holds files but no {MANIFEST}, so it is no set of ours: choose another out")
        return None

    def is_left(self) -> bool:
        """See `Work`."""
        return any(name.startswith(f"{_WRITING}/") for name in self._files())

    def restart(self, asked: dict[str, Any]) -> None:
        """See `Work`. A set that is replaced goes now: there is no second place from which it could be renamed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.closed = {}
        journal = self._journal_of(asked)
        self._put(f"{journal}/{_REQUEST}", json.dumps(asked).encode())
        others = [name for name in self._files() if name != f"{journal}/{_REQUEST}"]
        self._remove([name for name in (MANIFEST,) if name in others])
        self._remove([name for name in others if name != MANIFEST])
        self._journal = journal

    def publish(self) -> None:
        """See `Work`."""
        files = [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.rglob("*")) if path.is_file()]
        for name in sorted(files, key=lambda name: (name == MANIFEST, name.endswith(INDEX), name)):
            self._do(self._fs.put_file, str(self.folder / name), f"{self._root}/{name}")
        self.closed = {}
        self.begun = False  # a store whose listings lag might not show the manifest yet: nothing of the set is dropped
        self._remove_journals(self._files())

    def drop(self) -> None:
        """See `Work`. Shards go before the journal that knows of them."""
        files = self._files()
        if MANIFEST not in files:
            self._remove([name for name in files if not name.startswith(f"{_WRITING}/")])
        self._remove_journals(files)

    def _load(self, asked: dict[str, Any]) -> tuple[dict[str, Any] | None, Specs]:
        files = self._files()
        journal = self._journal_of(asked)
        if f"{journal}/{_REQUEST}" not in files:
            left = any(name.startswith(f"{_WRITING}/") and not name.endswith(f"/{_REQUEST}") for name in files)
            return ({"another": "request"} if left else None), {}
        self._journal = journal
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        closed: Specs = {}
        entries = [name for name in files if name.startswith(f"{journal}/") and not name.endswith(_REQUEST)]
        waiting = iter(sorted(entries, key=natural_key))  # as text, shard 100000 comes before shard 10001
        with ThreadPoolExecutor(_THREADS) as threads:
            while names := list(islice(waiting, 8 * _THREADS)):
                for name, entry in zip(names, threads.map(self._cat, names), strict=True):
                    self._take_up(name.split("/")[2], entry, files, closed)
        return asked, closed

    def _take_up(self, split: str, data: bytes, files: dict[str, int], closed: Specs) -> None:
        """Add the shard of a journal's entry, where it is the next one of its split and lies there whole."""
        entry = json.loads(data)
        facts = stored(entry["spec"])
        is_next = int(facts["basename"].split(".")[1]) == len(closed.get(split, ()))
        if is_next and files.get(f"{split}/{facts['basename']}") == facts["bytes"]:
            closed.setdefault(split, []).append(entry["spec"])
            (self.folder / split).mkdir(exist_ok=True)
            with (self.folder / split / CONTENTS).open("ab") as file:
                file.write(entry["contents"].encode())

    def can_copy(self, place: Location) -> bool:
        """See `Work`. A store copies within itself, where fsspec's file system of it knows how."""
        if not isinstance(place, FsspecPath) or place.filesystem is not self._fs:
            return False
        if isinstance(self._fs, AsyncFileSystem):
            return type(self._fs)._cp_file is not AsyncFileSystem._cp_file
        return type(self._fs).cp_file is not AbstractFileSystem.cp_file

    def _store(self, shard: ClosedShard, source: Location | None) -> None:
        name = f"{shard.split}/{shard.file}"
        if isinstance(source, FsspecPath):
            self._copy(source, name, stored(shard.spec)["bytes"])
        else:
            self._put(name, b"".join(shard.chunks) if source is None else source.read_bytes())

    def _copy(self, source: FsspecPath, name: str, size: int) -> None:
        self._do(self._fs.cp_file, source.path, f"{self._root}/{name}")
        self._fs.invalidate_cache()
        copied = self._do(self._fs.info, f"{self._root}/{name}")["size"]
        if copied != size:
            raise OSError(f"{source} has {copied} bytes, not {size}: see `pipeline shards verify` of its set")

    def _note(self, shard: ClosedShard, contents_size: int) -> None:
        entry = {"spec": shard.spec, "contents": shard.contents.decode()}
        self._put(f"{self._journal}/{shard.split}/{shard.file}.json", json.dumps(entry).encode())

    def _journal_of(self, asked: dict[str, Any]) -> str:
        return f"{_WRITING}/{xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())}"

    def _files(self) -> dict[str, int]:
        """The size of every object of the set, by its name below the set's address."""
        self._fs.invalidate_cache()
        try:
            found = self._do(self._fs.find, self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {str(name)[len(self._root) :].lstrip("/"): int(facts["size"]) for name, facts in found.items()}

    def _cat(self, name: str) -> bytes:
        data: bytes = self._do(self._fs.cat_file, f"{self._root}/{name}")
        return data

    def _put(self, name: str, data: bytes) -> None:
        self._do(self._fs.pipe_file, f"{self._root}/{name}", data)

    def _remove_journals(self, files: Iterable[str]) -> None:
        self._remove([name for name in files if name.startswith(f"{_WRITING}/")])

    def _remove(self, names: list[str]) -> None:
        if names:
            self._do(self._fs.rm, [f"{self._root}/{name}" for name in names])

    def _do(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the file system, whose errors are of many kinds.

        Raises:
            OSError: It failed.
        """
        try:
            return call(*args, **kwargs)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.where}: {error}") from error
        except PermissionError as error:
            raise PermissionError(f"{self.where}: access denied ({error}); check the credentials") from error
        except Exception as error:
            raise OSError(f"{self.where} cannot be reached: {type(error).__name__}: {error}") from error
