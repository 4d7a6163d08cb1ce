"""Pairs to MDS shards, in one pass: no intermediate copy, bytes in = bytes out, complete or absent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shards.images import CheckLevel, check_image
from shards.mds import SETS, SplitWriters
from shards.pair import Missing, Pair, Rejected
from shards.receipt import MANIFEST, read_receipt, write_receipt
from shards.report import Progress, Report, Tally
from shards.request import difference, make_request, record
from shards.sources import get_source
from shards.sources.base import Reading
from shards.staging import clear_leftovers, staged

MAX_CAPTION = 1 << 16
"""Characters; a longer caption is refused. DCI's longest are far below, a file with an open quotation mark above."""

_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def write_set(
    name: str,
    *,
    source: str | None = None,
    images: str | None = None,
    out: str | None = None,
    options: Mapping[str, str] | None = None,
    check: CheckLevel = "decode",
    overwrite: bool = False,
    allow_missing: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write a data set to `<out>/<split>/` as MDS shards, with a receipt in `<out>/manifest.json`.

    Args:
        name: A source in `shards.sources.SOURCES`.
        source: File or folder of the data; each source has a default or says what it needs.
        images: Folder or archive of the pictures, for sources that take one.
        out: Folder to write, `data/mds/<name>` by default.
        options: The source's own options, by name.
        check: How closely each picture is looked at before it is written: see `shards.images.check_image`.
        overwrite: Whether a set that is there, made by another request, is replaced.
        allow_missing: How many pictures may be missing. A benchmark without some of its pictures is another benchmark,
            so it is none by default.
        progress: Called after each item.

    Returns:
        The report; `already_there` is set where the same request had been written before.

    Raises:
        ValueError: The request makes no sense, `out` holds something else, not one pair came of it, or more pictures
            are missing than allowed: then nothing is written, and the message names them.
        FileNotFoundError: The data are not where they should be; the message says what to install or download.
    """
    chosen = get_source(name)
    request = make_request(chosen, source, images, options or {})
    target = Path(out).expanduser() if out else SETS / name
    asked = record(chosen, request, check)
    clear_leftovers(target.resolve())
    existing = _existing(target, name, asked, overwrite)
    if existing is not None:
        if existing.missing > allow_missing:
            raise ValueError(
                f"{target} is there without {existing.missing} pictures, which its missing.jsonl names; "
                f"{allow_missing} may be missing: get them and say overwrite, or --allow-missing {existing.missing}"
            )
        return existing
    start = time.perf_counter()
    reading = chosen.read(request)
    tally = Tally()
    with staged(target.resolve(), overwrite) as folder:
        _write(reading, folder, check, tally, progress)
        if tally.num_written == 0:
            raise ValueError(_nothing_written(name, tally))
        if tally.num_missing > allow_missing:
            raise ValueError(_too_many_missing(name, tally, allow_missing))
        write_receipt(folder, chosen, asked, tally)
    return Report(
        name=name,
        out=target,
        wanted=tally.done,
        written=dict(tally.written),
        rejected=tally.num_rejected,
        missing=tally.num_missing,
        empty_captions=tally.empty_captions,
        bytes=tally.bytes,
        seconds=time.perf_counter() - start,
        first_rejected=tally.first_rejected,
        first_missing=tally.first_missing,
    )


def _existing(out: Path, name: str, asked: dict[str, Any], overwrite: bool) -> Report | None:
    """The report of a set that already answers the request; None where `out` is free or may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    receipt = read_receipt(out) if out.is_dir() else None
    if receipt is None:
        raise ValueError(f"{out} exists and holds no {MANIFEST}, so it is no set of ours: choose another out")
    if receipt.content["name"] == name and receipt.request == asked:
        return receipt.report(out)
    if overwrite:
        return None
    changes = difference(receipt.content["name"], receipt.request, name, asked)
    raise ValueError(
        f"{out} holds {receipt.content['name']} from another request ({changes}): "
        "choose another out, or say overwrite to replace it"
    )


def _write(
    reading: Reading, folder: Path, check: CheckLevel, tally: Tally, progress: Callable[[Progress], None] | None
) -> None:
    """Send each item of the reading where it belongs, counting."""
    writers = SplitWriters(folder)
    ids: set[str] = set()
    try:
        for item in reading:
            if isinstance(item, Pair):
                captions = [caption for caption in item.captions if caption.strip()]
                tally.empty_captions += len(item.captions) - len(captions)
                problem = _problem(item, captions, ids, check)
                if problem is None:
                    ids.add(item.id)
                    writers.write(item, captions)
                    tally.written[item.split] += 1
                    tally.bytes += len(item.image)
                else:
                    item = Rejected(item.id, problem, item.split)
            if isinstance(item, Rejected):
                tally.reject(item)
                writers.note("rejected.jsonl", {"id": item.id, "reason": item.reason, "split": item.split})
            elif isinstance(item, Missing):
                tally.miss(item)
                line = {"id": item.id, "image": item.image_name, "reason": item.reason, "split": item.split}
                writers.note("missing.jsonl", line)
            if progress is not None:
                progress(Progress(tally.done, reading.wanted, tally.bytes))
        writers.finish()
    finally:
        writers.close()


def _problem(pair: Pair, captions: list[str], ids: set[str], check: CheckLevel) -> str | None:
    """Why a pair cannot be written, or None."""
    if pair.id in ids:
        return "duplicate id"
    if not captions:
        return "no caption that is not empty"
    longest = max(map(len, captions))
    if longest > MAX_CAPTION:
        return f"a caption of {longest} characters, above the limit of {MAX_CAPTION}; is a quotation mark left open?"
    if not _SPLIT.fullmatch(pair.split):
        return f"split {pair.split!r} cannot be a folder's name"
    try:
        pair.id.encode()
        check_image(pair.image, check)
    except ValueError as error:
        return str(error)
    return None


def _too_many_missing(name: str, tally: Tally, allowed: int) -> str:
    named = ", ".join(f"{item.id} ({item.image_name})" for item in tally.first_missing)
    more = tally.num_missing - len(tally.first_missing)
    return (
        f"{name}: {tally.num_missing} pictures are missing, {allowed} may be: {named}"
        f"{f' and {more} more' if more else ''}. Get them, or write the set without them (its missing.jsonl will name "
        f"all of them): --allow-missing {tally.num_missing}"
    )


def _nothing_written(name: str, tally: Tally) -> str:
    if tally.first_missing:
        wanted = ", ".join(repr(item.image_name) for item in tally.first_missing[:3])
        return (
            f"{name}: not one of {tally.num_missing} wanted pictures was found. Wanted, for example: {wanted}. "
            f"The first is {tally.first_missing[0].reason}. Point IMAGES (or SOURCE) at the folder or archive with them"
        )
    if tally.first_rejected:
        first = tally.first_rejected[0]
        return f"{name}: all {tally.num_rejected} items were rejected, the first, {first.id}, because: {first.reason}"
    return f"{name}: the source is empty, there is nothing to write"
