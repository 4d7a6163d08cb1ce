"""Measuring side by side: paired runs, their median and spread; memory; what travels; and the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Run = Callable[[], object]


class Paired(NamedTuple):
    """Seconds of two things that were run in turns."""

    first: list[float]
    second: list[float]

    @property
    def ratios(self) -> list[float]:
        """First over second, pair by pair."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    def __str__(self) -> str:
        medians = (1e3 * statistics.median(seconds) for seconds in self)
        return "{:8.0f} ms {:8.0f} ms".format(*medians)


def paired(first: Run, second: Run, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Paired:
    """Run both once to warm up, then in turns, so that whatever else the machine does meets both alike."""
    seconds = Paired([], [])
    for repeat in range(repeats + 1):
        for run, times in zip((first, second), seconds, strict=True):
            if dist.is_initialized():
                dist.barrier()
            began = clock()
            run()
            if repeat:
                times.append(clock() - began)
    return seconds


def spread(ratios: list[float]) -> str:
    """The median, and the smallest and largest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def peak_bytes(run: Run) -> int:
    """The largest sum of live allocations while it runs, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    live = peak = 0
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


class SentElements:
    """Counts, inside the `with`, the elements that this rank sends in collectives, in their cheapest (ring) form."""

    def __init__(self) -> None:
        self.total = 0
        world = dist.get_world_size()
        others = (world - 1) / world
        self._counted: dict[str, Callable[..., float]] = {
            "all_gather_into_tensor": lambda out, own, **_: others * out.numel(),
            "all_gather": lambda out, own, **_: others * sum(tensor.numel() for tensor in out),
            "reduce_scatter_tensor": lambda out, rows, **_: others * rows.numel(),
            "all_reduce": lambda tensor, **_: 2 * others * tensor.numel(),
            "all_to_all": lambda out, rows, **_: others * sum(tensor.numel() for tensor in rows),
            # torch's gather spells its backward all_to_all as one scatter from each rank where the backend is gloo
            "scatter": lambda out, rows, *_, **__: others * sum(tensor.numel() for tensor in rows or ()),
        }
        self._originals = {name: getattr(dist, name) for name in self._counted}

    def __enter__(self) -> SentElements:
        for name, elements in self._counted.items():
            setattr(dist, name, self._counting(self._originals[name], elements))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, original: Callable[..., object], elements: Callable[..., float]) -> Callable[..., object]:
        def call(*tensors: Tensor, **options: object) -> object:
            self.total += round(elements(*tensors, **options))
            return original(*tensors, **options)

        return call


def machine() -> str:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
