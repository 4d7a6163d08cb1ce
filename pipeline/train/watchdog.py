"""A rank that does not get on says where it stands, and in the end gives up, so that a scheduler can start it again.

Every rank watches itself. In a stall one rank waits for its data or computes, the others wait for it in a collective:
the lines of all ranks together say who waits for what.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from pipeline.train.stop import EXIT_STALLED


class Watchdog:
    """Watches from a thread how long the rank has been in one place. Use it as a context manager.

    Args:
        rank: of this process.
        say_after_s: seconds in one place after which one line says which; None watches nothing.
        exit_after_s: seconds in one place after which the process ends with exit code 75, after a line and the stacks
            of its threads on stderr.
    """

    def __init__(self, rank: int, say_after_s: float | None, exit_after_s: float) -> None:
        self._rank = rank
        self._say_after_s = say_after_s
        self._exit_after_s = exit_after_s
        self._place = ("starting", 0, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, phase: str, step: int) -> None:
        """Note what this rank begins to do, in words that go after `in`."""
        self._place = (phase, step, time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._say_after_s is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._say_after_s is not None
        said = None
        while not self._over.wait(min(1.0, self._say_after_s / 4)):
            place = self._place
            phase, step, since = place
            seconds = time.monotonic() - since
            if seconds > self._exit_after_s:
                self._say(f"{phase} at step {step} for {seconds:.0f} s: giving up (exit code {EXIT_STALLED})")
                faulthandler.dump_traceback(2)
                os._exit(EXIT_STALLED)
            if seconds > self._say_after_s and place is not said:
                said = place
                self._say(
                    f"{phase} at step {step} for {seconds:.0f} s; ends the run after {self._exit_after_s:.0f} s "
                    "(run.stall_exit_s)"
                )

    def _say(self, what: str) -> None:
        print(f"stalled: rank {self._rank} is in {what}", file=sys.stderr, flush=True)
