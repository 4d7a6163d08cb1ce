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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from shards.contents import CONTENTS
from shards.index import INDEX, chunks_of, facts_problem
from shards.location import Location, location
from shards.lock import waiting
from shards.mds import stored
from shards.receipt import MANIFEST
from shards.remote.base import RemotePath

ORIGIN = "origin.json"
_NOTES = ("rejected.jsonl", "missing.jsonl")


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
    try:
        manifest = (place / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{place} holds no {MANIFEST}: it is no set of shards, or not complete yet") from error
    name = f"{place.name}-{xxhash.xxh3_64_hexdigest(str(place).encode())}"
    folder = (cache or cache_dir()) / name
    if _content(folder / MANIFEST) == manifest:
        return folder
    with waiting(folder.with_name(f".{name}.lock")):
        if _content(folder / MANIFEST) == manifest:
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


def fetch(split_dir: Path, spec: dict[str, Any]) -> Path:
    """The stored file of a shard of a mirrored split; it is brought here when it is not here yet.

    Raises:
        OSError: It cannot be read, or what came is not what the index declares.
    """
    facts = stored(spec)
    path = split_dir / facts["basename"]
    if path.is_file():
        return path
    where = origin(split_dir)
    if where is None:
        raise FileNotFoundError(f"{path} is missing: write the set again")
    place = location(where) / split_dir.name / facts["basename"]
    data = place.read_bytes()
    problem = facts_problem(facts, [data])
    if problem is not None:
        raise OSError(f"{place} {problem}: see `pipeline shards verify {where}`")
    aside = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def drop_damaged(split_dir: Path, specs: Iterable[dict[str, Any]]) -> None:
    """Remove shards of a mirror that are not what the index declares: they will be fetched again."""
    for spec in specs:
        for facts in (spec["raw_data"], spec["zip_data"]):
            path = split_dir / facts["basename"] if facts else None
            if path is not None and path.is_file() and facts_problem(facts, chunks_of(path)) is not None:
                path.unlink()


def _copy_small_files(place: Location, manifest: bytes, folder: Path) -> None:
    splits = json.loads(manifest)["splits"]
    names = [f"{split}/{file}" for split in splits for file in (INDEX, CONTENTS)]
    for name in [*_NOTES, *names]:
        try:
            data = (place / name).read_bytes()
        except FileNotFoundError:
            continue  # the readers say what they miss
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / ORIGIN).write_text(json.dumps({"url": str(place)}) + "\n")
    (folder / MANIFEST).write_bytes(manifest)


def _origin(set_dir: Path) -> str | None:
    content = _content(set_dir / ORIGIN)
    return str(json.loads(content)["url"]) if content is not None else None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
