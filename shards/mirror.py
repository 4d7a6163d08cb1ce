"""Sets that lie elsewhere, read through a folder on this machine into which shards come when they are needed.

    <cache>/<name>-<hash of the address>/
      origin.json       where the set is
      manifest.json     and the other small files, as they are there
      train/            the index and the contents; shards come when somebody reads them

Whatever reads a set takes such a folder for one. A set that has changed at its place is mirrored anew.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from shards.contents import CONTENTS
from shards.index import INDEX, chunks_of, facts_problem
from shards.location import Location, location
from shards.lock import waiting
from shards.mds import stored
from shards.receipt import MANIFEST, fingerprint
from shards.remote.base import RemotePath
from shards.stopped import is_full

ORIGIN = "origin.json"
_NOTES = ("rejected.jsonl", "missing.jsonl")
_CHUNK = 1 << 20


def cache_dir() -> Path:
    """Where mirrors lie when nobody says otherwise: `$PIPELINE_CACHE`, else `hn-clip` in the user's cache folder."""
    stated = os.environ.get("PIPELINE_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(stated or f"{user}/hn-clip").expanduser()


def mirror(address: str, cache: Path | None = None) -> Path:
    """The folder that stands for a set elsewhere, with everything but its shards.

    Args:
        address: A URL, or the path of a local set whose shards are to be unpacked beside it and not in it.
        cache: Where mirrors lie, `cache_dir()` by default.

    Raises:
        ValueError: No set is there, or it is not whole yet.
        OSError: It cannot be read.
    """
    place = location(address)
    if isinstance(place, RemotePath) and place.url != str(place):
        raise ValueError(
            f"{place}: a set is read through its address alone, which must not hold a password or signature: state "
            "them as its file system takes them (environment, configuration file, .netrc)"
        )
    if isinstance(place, RemotePath):
        place.refresh()
    try:
        manifest = (place / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{place} holds no {MANIFEST}: it is no set of shards, or not complete yet") from error
    name = f"{place.name}-{xxhash.xxh3_64_hexdigest(str(place).encode())}"
    folder = (cache or cache_dir()) / name
    if _is_of(folder, manifest):
        return folder
    with _naming_the_cache(folder.parent), waiting(folder.with_name(f".{name}.lock")):
        if _is_of(folder, manifest):
            return folder  # another process has made it meanwhile, and may be reading it already
        fresh = folder.with_name(f".{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            _copy_small_files(place, manifest, fresh)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def origin(split_dir: Path) -> str | None:
    """Where the shards of a mirrored split are, or None for a split that is at home here."""
    return _origin(split_dir.resolve().parent)


def home_of(split_dir: Path, spec: dict[str, Any]) -> Location | None:
    """Where the stored file of a shard of a mirrored split is, or None for a split that is at home here."""
    where = origin(split_dir)
    return None if where is None else location(where) / split_dir.name / stored(spec)["basename"]


def fetch(split_dir: Path, spec: dict[str, Any]) -> Path:
    """The stored file of a shard of a mirrored split; it is brought here when it is not here yet.

    Raises:
        OSError: It cannot be read, or what came is not what the index declares.
    """
    facts = stored(spec)
    path = split_dir / facts["basename"]
    if path.is_file():
        return path
    place = home_of(split_dir, spec)
    if place is None:
        raise FileNotFoundError(f"{path} is missing: write the set again")
    data = place.read_bytes()
    problem = facts_problem(facts, [data])
    if problem is not None:
        raise OSError(f"{place} {problem}: see `pipeline shards verify {origin(split_dir)}`")
    aside = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with _naming_the_cache(split_dir.parent.parent):
            aside.write_bytes(data)
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


@contextmanager
def fetched(split_dir: Path, spec: dict[str, Any]) -> Iterator[Path]:
    """As `fetch`, for one use: what was not here before does not stay."""
    was_here = (split_dir / stored(spec)["basename"]).is_file()
    path = fetch(split_dir, spec)
    try:
        yield path
    finally:
        if not was_here:
            path.unlink(missing_ok=True)


def drop_damaged(split_dir: Path, specs: Iterable[dict[str, Any]]) -> None:
    """Remove shards of a mirror that are not what the index declares: they will be fetched again."""
    for spec in specs:
        for facts in (spec["raw_data"], spec["zip_data"]):
            path = split_dir / facts["basename"] if facts else None
            if path is not None and path.is_file() and facts_problem(facts, chunks_of(path)) is not None:
                path.unlink()


def _is_of(folder: Path, manifest: bytes) -> bool:
    """Whether a mirror is that of the set with this manifest, and its indexes are still those of the set."""
    if _content(folder / MANIFEST) != manifest:
        return False
    splits = json.loads(manifest)["splits"].items()
    return all(_problem(folder / split / INDEX, entry["index"]) is None for split, entry in splits)


def _problem(path: Path, facts: dict[str, Any]) -> str | None:
    """What is wrong with a file, by its size and hash in the manifest."""
    if not path.is_file():
        return "is missing"
    return None if fingerprint(path) == facts else "is another one than the manifest says"


def _copy_small_files(place: Location, manifest: bytes, folder: Path) -> None:
    """Everything but the shards, of one state of the set.

    Raises:
        OSError: A file is not what the manifest says.
    """
    folder.mkdir(parents=True)
    for note in _NOTES:
        _copy(place / note, folder / note)
    for split, entry in json.loads(manifest)["splits"].items():
        (folder / split).mkdir()
        for name, facts in ((INDEX, entry["index"]), (CONTENTS, entry.get("contents"))):
            path = folder / split / name
            _copy(place / split / name, path)
            if facts is not None and (problem := _problem(path, facts)):
                raise OSError(f"{place / split / name} {problem}: is the set being written again? Try again then")
    (folder / ORIGIN).write_text(json.dumps({"url": str(place)}) + "\n")
    (folder / MANIFEST).write_bytes(manifest)


def _copy(place: Location, path: Path) -> None:
    """Copy a file, where there is one: the list of contents of a large set takes gigabytes."""
    try:
        with place.open("rb") as source:
            chunk = source.read(_CHUNK)
            with path.open("wb") as file:
                while chunk:
                    file.write(chunk)
                    chunk = source.read(_CHUNK)
    except FileNotFoundError:
        pass


@contextmanager
def _naming_the_cache(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise OSError(f"the cache {cache} cannot be written: {error.strerror}; PIPELINE_CACHE names another") from error


def _origin(set_dir: Path) -> str | None:
    content = _content(set_dir / ORIGIN)
    return str(json.loads(content)["url"]) if content is not None else None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
