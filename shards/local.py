"""A set that is written to a folder: made beside it, and renamed.

Beside `<out>` lies, while a run works and after one that was cut short, the folder `.<out>.writing`:

    lock            held by the run that works on it
    journal.jsonl   the request, then one line for each closed shard; each line is on the disk before the next shard is
    set/            what will become `<out>`
    old/            the set that is just being replaced
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shards.contents import CONTENTS
from shards.location import Location
from shards.mds import ClosedShard, stored
from shards.receipt import MANIFEST, Receipt, read_receipt
from shards.staging import sync, sync_tree
from shards.work import Specs, Work


class LocalWork(Work):
    """The work on a set in a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        home = self.target.with_name(f".{self.target.name}.writing")
        super().__init__(str(target), home, home / "set", str(target))
        self._journal = home / "journal.jsonl"
        self._old = home / "old"

    @contextmanager
    def held(self) -> Iterator[None]:
        """See `Work`. A set that a killed run had moved aside comes back."""
        with super().held():
            if self._old.exists() and not self.target.exists():
                os.rename(self._old, self.target)
            shutil.rmtree(self._old, ignore_errors=True)
            yield

    def existing(self) -> Receipt | None:
        """See `Work`."""
        if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
            return None
        receipt = read_receipt(self.target) if self.target.is_dir() else None
        if receipt is None:
            raise ValueError(
                f"{self.where} exists and holds no {MANIFEST}, so it is no set of ours: choose another out"
            )
        return receipt

    def is_left(self) -> bool:
        """See `Work`."""
        return self.home.exists()

    def restart(self, asked: dict[str, Any]) -> None:
        """See `Work`."""
        self.drop()
        self.closed = {}
        self.folder.mkdir()
        self._append(asked)
        sync(self.home)

    def drop(self) -> None:
        """See `Work`."""
        self._journal.unlink(missing_ok=True)  # first: without it, nothing of the rest counts
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self) -> None:
        """See `Work`. A set that is replaced stays whole until the new one is."""
        sync_tree(self.folder)
        if self.target.exists():
            os.rename(self.target, self._old)
        os.rename(self.folder, self.target)
        sync(self.target.parent)
        self.closed = {}
        shutil.rmtree(self._old, ignore_errors=True)

    def _store(self, shard: ClosedShard, source: Location | None) -> None:
        assert source is None or isinstance(source, Path), "nothing else can be copied to a folder"
        path = self.folder / shard.split / shard.file
        if source is not None and _linked(source, path):
            sync(path.parent)
            return
        with path.open("wb") as file:
            if source is not None:
                with source.open("rb") as original:
                    shutil.copyfileobj(original, file, 1 << 20)
            file.writelines(shard.chunks)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)

    def _note(self, shard: ClosedShard, contents_size: int) -> None:
        self._append({"split": shard.split, "spec": shard.spec, "contents": contents_size})

    def _append(self, line: dict[str, Any]) -> None:
        with self._journal.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _load(self, asked: dict[str, Any]) -> tuple[dict[str, Any] | None, Specs]:
        lines = list(_whole_lines(self._journal))
        if not lines or lines[0] != asked:
            return (lines[0] if lines and len(lines) > 1 else None), {}
        closed: Specs = {}
        sizes: dict[str, int] = {}
        for line in lines[1:]:
            if not _is_there(self.folder / line["split"], line):
                break
            closed.setdefault(line["split"], []).append(line["spec"])
            sizes[line["split"]] = line["contents"]
        self._trim(closed, sizes)
        return asked, closed

    def _trim(self, closed: Specs, sizes: dict[str, int]) -> None:
        """Bring journal and folder to exactly the closed shards."""
        kept = {f"{split}/{stored(spec)['basename']}" for split, specs in closed.items() for spec in specs}
        kept |= {f"{split}/{CONTENTS}" for split in closed}
        for path in list(self.folder.rglob("*")):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in kept:
                path.unlink()
        for split, size in sizes.items():
            os.truncate(self.folder / split / CONTENTS, size)
        lines = self._journal.read_bytes().splitlines(keepends=True)
        number = 1 + sum(map(len, closed.values()))
        os.truncate(self._journal, sum(map(len, lines[:number])))


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    """The lines of a journal up to the first that was not written whole."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            yield json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n"):
            return


def _linked(source: Path, path: Path) -> bool:
    """Give a file a second name, where the file system can."""
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        return False
    sync(path)
    return True


def _is_there(split_dir: Path, line: dict[str, Any]) -> bool:
    facts, contents = stored(line["spec"]), split_dir / CONTENTS
    path = split_dir / facts["basename"]
    return (
        path.is_file()
        and path.stat().st_size == facts["bytes"]
        and contents.is_file()
        and contents.stat().st_size >= line["contents"]
    )
