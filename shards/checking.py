"""Looking at pairs before they are written, here or in worker processes. The order is the source's in both cases."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

from shards.contents import content_line, content_of
from shards.images import CheckLevel, check_image
from shards.pair import Item, Missing, Pair, Rejected
from shards.parts import BlockEnd
from shards.replay import Replay

MAX_CAPTION = 1 << 16
"""Characters; a longer caption is refused. DCI's longest are far below, a file with an open quotation mark above."""

MAX_IMAGE = 1 << 30
"""Bytes of an encoded picture; a shard cannot hold one of more than 4 GiB."""

_BATCH_ITEMS, _BATCH_BYTES = 64, 4 << 20


@dataclass(slots=True)
class Seen:
    """A pair that was looked at. `line` is its line of contents, or None with the `problem` that keeps it out.

    `captions` are those that are not empty. `closed`: it lies in a closed shard of an earlier run. `behind`: it does
    not, although closed shards hold pairs that have not come by yet; only what is kept out may stand there.
    """

    pair: Pair
    captions: list[str]
    line: str | None = None
    problem: str | None = None
    closed: bool = False
    behind: bool = False


Looked = Seen | Rejected | Missing | BlockEnd


def look_at_all(items: Iterable[Item | BlockEnd], level: CheckLevel, workers: int, replay: Replay) -> Iterator[Looked]:
    """Look at each pair, once, in order; what is no pair is handed on.

    Args:
        items: Of a source.
        level: How closely: see `shards.images.check_image`.
        workers: Processes that look; with 1 it is done here. A few batches of 4 MB are in memory for each.
        replay: Knows the pairs that need no second look.

    Raises:
        OSError: A worker process died.
    """
    if workers == 1:
        for item in items:
            seen = _prepare(item, replay)
            if isinstance(seen, Seen) and not seen.closed:
                seen.problem, seen.line = look_at(seen.pair.id, seen.pair.image, seen.captions, level)
            yield seen
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool:
        waiting: deque[_Batch] = deque()
        try:
            for batch in _batches(items, replay):
                batch.start(pool, level)
                waiting.append(batch)
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().finish()
            while waiting:
                yield from waiting.popleft().finish()
        except BrokenProcessPool as error:
            raise OSError("a worker process died, perhaps for want of memory: try again with fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def look_at(id: str, image: bytes, captions: list[str], level: CheckLevel) -> tuple[str | None, str | None]:
    """What keeps a pair out, or its line of contents."""
    if not captions:
        return "no caption that is not empty", None
    longest = max(map(len, captions))
    if longest > MAX_CAPTION:
        return (
            f"a caption of {longest} characters, above the limit of {MAX_CAPTION}; is a quotation mark left open?",
            None,
        )
    if len(image) > MAX_IMAGE:
        return f"a picture of {len(image)} bytes, above the limit of {MAX_IMAGE}", None
    try:
        id.encode()
        line = content_line(content_of(id, image, captions))
        check_image(image, level)
    except ValueError as error:
        return str(error), None
    return None, line


def _prepare(item: Item | BlockEnd, replay: Replay) -> Looked:
    if not isinstance(item, Pair):
        return item
    seen = Seen(item, [caption for caption in item.captions if caption.strip()])
    if not replay.is_over(item.split):
        try:
            seen.line = content_line(content_of(item.id, item.image, seen.captions))
            seen.closed = replay.holds(item.split, seen.line)
        except UnicodeEncodeError:
            pass  # it was kept out before, and will be again
        seen.behind = not seen.closed
    return seen


class _Batch:
    """Some neighbouring items, of which a worker looks at those that need it."""

    def __init__(self) -> None:
        self.items: list[Looked] = []
        self._open: list[Seen] = []
        self._bytes = 0
        self._answers: Future[list[tuple[str | None, str | None]]] | None = None

    def add(self, item: Looked) -> None:
        self.items.append(item)
        if isinstance(item, Seen):
            self._bytes += len(item.pair.image)
            if not item.closed:
                self._open.append(item)

    @property
    def full(self) -> bool:
        return len(self.items) >= _BATCH_ITEMS or self._bytes >= _BATCH_BYTES

    def start(self, pool: ProcessPoolExecutor, level: CheckLevel) -> None:
        work = [(seen.pair.id, seen.pair.image, seen.captions) for seen in self._open]
        if work:
            self._answers = pool.submit(_look_at_several, work, level)

    def finish(self) -> list[Looked]:
        if self._answers is not None:
            for seen, answer in zip(self._open, self._answers.result(), strict=True):
                seen.problem, seen.line = answer
        return self.items


def _batches(items: Iterable[Item | BlockEnd], replay: Replay) -> Iterator[_Batch]:
    batch = _Batch()
    for item in items:
        batch.add(_prepare(item, replay))
        if batch.full:
            yield batch
            batch = _Batch()
    yield batch


def _look_at_several(
    work: list[tuple[str, bytes, list[str]]], level: CheckLevel
) -> list[tuple[str | None, str | None]]:
    return [look_at(id, image, captions, level) for id, image, captions in work]


def _start_worker() -> None:
    """Ctrl-C is the writer's to act on. A worker whose writer was killed would wait for work for ever: it ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = parent_process()
    assert writer is not None
    threading.Thread(target=_end_with, args=(writer.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
