"""What a user is told where a write ends before its time: why, and what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC

from shards.work import Work


class Stopped(KeyboardInterrupt):
    """A write that was stopped by its user. The message says what is kept."""


def is_full(error: BaseException) -> bool:
    """Whether a disk, or a user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT)


@contextmanager
def saying_what_is_kept(work: Work) -> Iterator[None]:
    """Errors and Ctrl-C inside say what the next run goes on from; a full disk is named as the work's.

    Raises:
        Stopped: Ctrl-C.
        OSError, ValueError: As inside.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not work.begun:
            raise
        kept = f"{work.num_closed:,} pairs are kept, the same command goes on from there"
        raise Stopped(f"stopped: {kept if work.closed else 'not one shard was full yet, nothing is kept'}") from None
    except (OSError, ValueError) as error:
        full = is_full(error)  # from wherever it comes: only we write
        if not work.closed and not full:
            raise
        said = f"{work.disk} cannot be written: {os.strerror(ENOSPC)}" if full else str(error)
        kept = f"; {work.num_closed:,} pairs are kept, the same command goes on from there" if work.closed else ""
        raise (OSError if isinstance(error, OSError) else ValueError)(said + kept) from error
