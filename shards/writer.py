"""Pairs to MDS shards, in one pass: no intermediate copy, bytes in = bytes out, complete or absent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shards.checking import Seen, look_at_all
from shards.ids import Ids
from shards.images import CheckLevel
from shards.mds import SETS, ShardFormat
from shards.output import open_work
from shards.pair import Missing, Rejected
from shards.parts import BlockEnd, Part, Share
from shards.receipt import write_receipt
from shards.replay import Replay, SourceChangedError
from shards.report import Progress, Report, Tally, nothing_written, too_many_missing
from shards.request import make_request, origin, record
from shards.sources import get_source
from shards.sources.base import Reading, Request, Source
from shards.splits import SplitWriters
from shards.stopped import saying_what_is_kept
from shards.work import Work, written_before

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
    workers: int = 1,
    format: ShardFormat | None = None,
    part: Part | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Write a data set to `<out>/<split>/` as MDS shards, with a receipt in `<out>/manifest.json`.

    A run that was cut short is taken up by the next one with the same request: the source is read again, and passed
    over as far as closed shards hold it. The set is then, byte for byte, that of an uninterrupted run.

    Args:
        name: A source in `shards.sources.SOURCES`.
        source: File or folder of the data; each source has a default or says what it needs.
        images: Folder or archive of the pictures, for sources that take one.
        out: Folder or object store (any URL that fsspec knows) to write to, `data/mds/<name>` by default; a part goes
            to a folder of its own in `data/mds/<name>.parts`.
        options: The source's own options, by name.
        check: How closely each picture is looked at before it is written: see `shards.images.check_image`.
        overwrite: Whether a set that is there, made by another request, is replaced.
        allow_missing: How many pictures may be missing. A benchmark without some of its pictures is another benchmark,
            so it is none by default.
        workers: Processes that check pictures. The set is the same whatever their number.
        format: Compression, hashes and size of shards.
        part: Write only this share of the source, to be merged with the others: see `shards.parts`.
        progress: Called after each item.
        say: Called with what there is to say before the first item: that it goes on, or starts anew.

    Returns:
        The report; `already_there` is set where the same request had been written before.

    Raises:
        ValueError: The request makes no sense, `out` holds something else or is being written by another run, not one
            pair came of it, or more pictures are missing than allowed: the message names them.
        FileNotFoundError: The data are not where they should be; the message says what to install or download.
        OSError: Reading or writing failed; the message says what is kept.
        Stopped: Ctrl-C.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers cannot work: say 1 or more")
    format = format or ShardFormat()
    chosen, request, asked = prepare(
        name, source=source, images=images, options=options, check=check, format=format, part=part
    )
    whole = str(SETS / name)
    work = open_work(out or (part.place(whole) if part else whole))
    found = written_before(work, asked, overwrite, allow_missing)
    if found is not None and not work.is_left():
        return found
    reading: Reading | None = chosen.read(request)  # what is wrong with it is said before anything is made
    start, say = time.perf_counter(), say or _say_nothing
    with saying_what_is_kept(work), work.held():
        found = written_before(work, asked, overwrite, allow_missing)
        if found is not None:
            work.tidy(asked)
            return found
        if line := work.begin(asked):
            say(line)
        went_on = work.num_closed
        judge = partial(_judge, name, allow_missing, part is not None)
        while True:
            share, tally = Share(reading or chosen.read(request), part), Tally()
            reading = None
            try:
                _write(share, work, format, check, workers, tally, judge, progress)
                break
            except SourceChangedError:
                say(f"{name} no longer gives the pairs that were already written: starting anew")
                work.restart(asked)
                went_on = 0
        write_receipt(work.folder, chosen, asked["request"], tally, share.record(), origin(request))
        work.publish()
    return Report(
        name=name,
        out=work.where,
        wanted=tally.done,
        written=dict(tally.written),
        rejected=tally.num_rejected,
        missing=tally.num_missing,
        empty_captions=tally.empty_captions,
        bytes=tally.bytes,
        seconds=time.perf_counter() - start,
        first_rejected=tally.first_rejected,
        first_missing=tally.first_missing,
        went_on_after=went_on,
    )


REQUEST = ("source", "images", "options", "check", "format")
"""What of the arguments of `write_set` decides which pairs are written, and how."""


def prepare(
    name: str,
    *,
    source: str | None = None,
    images: str | None = None,
    options: Mapping[str, str] | None = None,
    check: CheckLevel = "decode",
    format: ShardFormat | None = None,
    part: Part | None = None,
) -> tuple[Source, Request, dict[str, Any]]:
    """The source, what it is asked for, and what a receipt and a journal keep of that, and compare.

    Raises:
        ValueError: There is no such source, or it does not take this.
    """
    chosen = get_source(name)
    request = make_request(chosen, source, images, options or {})
    kept = record(chosen, request, check) | {"shards": (format or ShardFormat()).record()}
    if part is not None:
        kept["part"] = part.record()
    return chosen, request, {"name": name, "request": kept}


def _say_nothing(line: str) -> None:
    """What is said where nobody listens."""


def _write(
    share: Share,
    work: Work,
    format: ShardFormat,
    check: CheckLevel,
    workers: int,
    tally: Tally,
    judge: Callable[[Tally], None],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Send each item of the share where it belongs, counting."""
    counts = {split: sum(spec["samples"] for spec in specs) for split, specs in work.closed.items()}
    replay = Replay(work.folder, counts)
    ids = Ids()
    with SplitWriters(work, format).open() as writers:
        for item in look_at_all(share, check, workers, replay):
            if isinstance(item, BlockEnd):
                share.end_block(tally.written)
                writers.cut()
                continue
            if isinstance(item, Seen):
                tally.empty_captions += len(item.pair.captions) - len(item.captions)
                problem = _problem(item, ids)
                if problem is None:
                    _accept(item, writers, tally)
                else:
                    item = Rejected(item.pair.id, problem, item.pair.split)
            if isinstance(item, Rejected):
                tally.reject(item)
                writers.note("rejected.jsonl", {"id": item.id, "reason": item.reason, "split": item.split})
            elif isinstance(item, Missing):
                tally.miss(item)
                line = {"id": item.id, "image": item.image_name, "reason": item.reason, "split": item.split}
                writers.note("missing.jsonl", line)
            if progress is not None:
                progress(Progress(tally.done, share.wanted, tally.bytes))
        replay.check_over()
        judge(tally)
        writers.finish()


def _accept(seen: Seen, writers: SplitWriters, tally: Tally) -> None:
    if seen.behind:
        raise SourceChangedError
    if not seen.closed:
        assert seen.line is not None
        writers.write(seen.pair, seen.captions, seen.line)
    tally.written[seen.pair.split] += 1
    tally.bytes += len(seen.pair.image)


def _problem(seen: Seen, ids: Ids) -> str | None:
    """Why a pair cannot be written, or None: then its id is one of `ids`."""
    if seen.problem is not None:
        return "duplicate id" if seen.pair.id in ids else seen.problem
    if not _SPLIT.fullmatch(seen.pair.split):
        return f"split {seen.pair.split!r} cannot be a folder's name"
    return None if ids.add(seen.pair.id) else "duplicate id"


def _judge(name: str, allow_missing: int, is_part: bool, tally: Tally) -> None:
    """Refuse what is no set: without a pair, unless it is a part, or with more pictures missing than may be."""
    if tally.num_written == 0 and not is_part:
        raise ValueError(nothing_written(name, tally))
    if tally.num_missing > allow_missing:
        raise ValueError(too_many_missing(name, tally, allow_missing))
