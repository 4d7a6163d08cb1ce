"""Reading epochs for the tests of the loader, in this process or on ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data import Batch, TrainingData
from pipeline.preprocess import Preprocess

PREPROCESS = Preprocess(size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
Pairs = list[tuple[str, str]]  # the (id, caption) of each sample of a batch, in order


class Utf8:
    """Captions as their bytes, padded by zeros: what went in can be read back."""

    pad_id = 0

    def __call__(self, captions: Sequence[str]) -> Tensor:
        encoded = [caption.encode() for caption in captions]
        longest = max(map(len, encoded))
        return torch.tensor([[*line, *[0] * (longest - len(line))] for line in encoded])

    def with_cut(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self(captions), torch.zeros(len(captions), dtype=torch.bool)


def training_data(
    split: Path, batch_size: int, world_size: int = 1, workers: int = 0, seed: int = 7, **options: Any
) -> TrainingData:
    tokenizer: Any = Utf8()
    sizes = {"batch_size": batch_size, "world_size": world_size, "workers": workers, "seed": seed}
    return TrainingData(split, PREPROCESS, tokenizer, **sizes, **options)


def pairs_of(batch: Batch) -> Pairs:
    captions = [bytes(line).rstrip(b"\0").decode() for line in batch["input_ids"].tolist()]
    return list(zip(batch["ids"], captions, strict=True))


def read_epoch(data: TrainingData, epoch: int = 0, batches_done: int = 0) -> list[Pairs]:
    return [pairs_of(batch) for batch in data.epoch(epoch, batches_done)]


def read_on_rank(split: Path, batch_size: int, workers: int, asked: Sequence[tuple[int, int]]) -> tuple[int, list[Any]]:
    """The length that the data claim, and the batches of each (epoch, batches done) on this rank."""
    # As `pipeline.train.distributed` does: without it streaming takes every rank for the first of a node of its own.
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    with _like_a_launchers_rank():
        data = training_data(split, batch_size, dist.get_world_size(), workers)
        return len(data), [read_epoch(data, *position) for position in asked]


@contextmanager
def _like_a_launchers_rank() -> Iterator[None]:
    """The fixture's ranks are daemons, which Python lets have no children, and their children would be spawned."""
    process: Any = multiprocessing.current_process()
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    process._config["daemon"] = False
    try:
        yield
    finally:
        process._config["daemon"] = True
        multiprocessing.set_start_method(method, force=True)


def interleave(per_rank: Sequence[list[Pairs]]) -> list[Pairs]:
    """The global batches: sample k of one lies on rank k mod W."""
    return [[pair for row in zip(*parts, strict=True) for pair in row] for parts in zip(*per_rank, strict=True)]
