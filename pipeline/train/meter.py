"""What a stretch of training costs: pairs and tokens per second, where the time goes, memory of every process."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil
import torch

from pipeline.data import Batch
from pipeline.train.distributed import Ranks

_FOLD_AT = 1024  # spans of a CUDA device that are kept before those that are over are added up
_MIB = 1 << 20


class HostClock:
    """Time as this process sees it."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def is_past(self, mark: Any) -> bool:
        """Whether the mark is reached."""
        return True

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks that are reached."""
        return float(last - first)


class CudaClock:
    """Time as the current CUDA stream sees it: marks are events, and nobody waits for them."""

    def mark(self) -> Any:
        """An event after the work that is queued now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device has come so far."""
        return bool(mark.query())

    def seconds(self, first: Any, last: Any) -> float:
        """Between two events that the device has passed."""
        return float(first.elapsed_time(last)) / 1000


class Phase:
    """Seconds spent in one kind of work. Use it as `with phase:`, which nests, or by `begin` and `end`.

    Threads measure apart: on CUDA devices autograd runs backward passes in a thread of its own.
    """

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        self._seconds = 0.0
        self._here = threading.local()

    def begin(self) -> None:
        """Start counting, if this thread is not counting already."""
        if getattr(self._here, "began", None) is None:
            self._here.began = self._clock.mark()

    def end(self) -> None:
        """Stop counting, if this thread is."""
        began = getattr(self._here, "began", None)
        if began is not None:
            self._here.began = None
            self._spans.append((began, self._clock.mark()))
            if len(self._spans) >= _FOLD_AT:
                self._fold()

    def __enter__(self) -> None:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        self.begin()

    def __exit__(self, *error: object) -> None:
        self._here.depth -= 1
        if self._here.depth == 0:
            self.end()

    def take(self) -> float:
        """Seconds since the last call. What a CUDA device has not reached yet counts in the next one."""
        self._fold()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _fold(self) -> None:
        spans, self._spans = self._spans, []
        for first, last in spans:
            if self._clock.is_past(last):
                self._seconds += self._clock.seconds(first, last)
            else:
                self._spans.append((first, last))


class Meter:
    """Figures of a stretch of training, from one `read` or `restart` to the next, over all ranks.

    Args:
        pairs_per_step: of all ranks.
        ranks: all of them.

    Attributes:
        data: waiting for the loader, by the host's clock.
        objective: the terms of the loss and their gradients with respect to the features, with their collectives.
        communication: inside collectives, waiting for slower ranks included; see `pipeline.train.collectives`.
            Those of the objective count there as well. What DeepSpeed overlaps with computation counts in full.
        steps: optimizer steps done.
    """

    def __init__(self, pairs_per_step: int, ranks: Ranks) -> None:
        on_device = CudaClock() if ranks.device.type == "cuda" else HostClock()
        self.data, self.objective, self.communication = Phase(HostClock()), Phase(on_device), Phase(on_device)
        self._pairs_per_step = pairs_per_step
        self._ranks = ranks
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: evaluations and checkpoints between two epochs are no training."""
        for phase in (self.data, self.objective, self.communication):
            phase.take()
        self.steps = self._num_tokens = self._num_cut = self._num_captions = 0
        self._began = time.perf_counter()

    def count(self, batch: Batch) -> None:
        """Take account of a micro-batch of this rank."""
        self._num_tokens += batch["num_tokens"]
        self._num_cut += int(batch["cut"].sum())
        self._num_captions += len(batch["cut"])

    def read(self) -> dict[str, Any]:
        """Figures since the last reading. A collective of all ranks, and the same on all.

        pairs_per_second, tokens_per_second: of all ranks; tokens as the text tower gets them, without padding.
        captions_cut: the share that was longer than the context.
        time_share: of the time, means over the ranks; they overlap. data_slowest: of the rank that waited longest.
        memory: MiB, by rank: rss of the rank, workers of its child processes, the loader's above all (pages that they
            share count in each), cuda_peak allocated since the start.
        """
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        seconds = max(time.perf_counter() - self._began, 1e-9)
        own: dict[str, Any] = {
            "data": self.data.take() / seconds,
            "objective": self.objective.take() / seconds,
            "communication": self.communication.take() / seconds,
            "num_tokens": self._num_tokens,
            "num_cut": self._num_cut,
            "num_captions": self._num_captions,
            "memory": memory_mib(self._ranks.device),
        }
        everyones = self._ranks.gather(own)
        total = {name: sum(one[name] for one in everyones) for name in ("num_tokens", "num_cut", "num_captions")}
        shares = {name: [one[name] for one in everyones] for name in ("data", "objective", "communication")}
        figures = {
            "pairs_per_second": self._pairs_per_step * self.steps / seconds,
            "tokens_per_second": total["num_tokens"] / seconds,
            "captions_cut": total["num_cut"] / max(1, total["num_captions"]),
            "time_share": {name: sum(values) / len(values) for name, values in shares.items()}
            | {"data_slowest": max(shares["data"])},
            "memory": {name: [one["memory"][name] for one in everyones] for name in own["memory"]},
        }
        self.restart()
        return figures


def memory_mib(device: torch.device) -> dict[str, float]:
    """Memory of this process and its children now, in MiB, and the most that it has allocated on a CUDA device."""
    process = psutil.Process()
    workers = 0
    for child in process.children(recursive=True):
        try:
            workers += child.memory_info().rss
        except psutil.Error:  # it has ended
            continue
    found = {"rss": process.memory_info().rss / _MIB, "workers": workers / _MIB}
    if device.type == "cuda":
        found["cuda_peak"] = torch.cuda.max_memory_allocated(device) / _MIB
    return {name: round(value, 1) for name, value in found.items()}
