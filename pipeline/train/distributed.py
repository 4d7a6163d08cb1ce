"""Ranks: who am I, which device, which backend, how many threads."""

from __future__ import annotations

import glob
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.train.launch_env import set_rank_variables

T = TypeVar("T")

_SHM = "/dev/shm"
_SHM_PER_RANK = 80 << 20  # DeepSpeed's CPU collectives map about 69 MB for each rank, streaming a little more


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def max(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks; the same on all."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def mean(self, values: list[float]) -> list[float]:
        """The mean over the ranks of each value; the same on all."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) / self.world_size for value in tensor]

    def on_main(self, action: Callable[[], T]) -> T:
        """What the action gives on the main rank, on every rank; what it raises is raised on every rank as well."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except (ValueError, OSError) as error:
                outcome[1] = error
            except Exception as error:  # of a class that other ranks might not be able to unpickle
                dist.broadcast_object_list([None, RuntimeError(f"on rank 0: {type(error).__name__}: {error}")], src=0)
                raise
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        value: T = outcome[0]
        return value

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()


@contextmanager
def distributed() -> Iterator[Ranks]:
    """Join the other ranks; one process alone is a world of one.

    CUDA devices and nccl where there are any, else the CPU and gloo with the machine's cores shared out among the
    local ranks. DeepSpeed's shared-memory buffers are unlinked as soon as every rank has mapped them, so that nothing
    is left in /dev/shm whatever happens to the run.
    """
    import deepspeed

    # torch renames its collectives; DeepSpeed and we use the names that older releases have as well.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    set_rank_variables(os.environ)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    _check_shared_memory(local_size)
    joined_here = not dist.is_initialized()
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device)
    dist.barrier()
    if local_rank == 0:
        _unlink_own_buffers()
    yield ranks
    # Not after an error: ranks that wait for this one would fail before it has said why. `leave` then ends the group.
    if joined_here:
        leave()


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _unlink_own_buffers() -> None:
    """Remove the names of this launch's buffers; the mappings live on in the ranks. Other launches use other ports."""
    prefix = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_"
    for path in glob.glob(f"{_SHM}/{glob.escape(prefix)}*"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue


def _check_shared_memory(local_size: int) -> None:
    if not os.path.isdir(_SHM):
        return
    needed = _SHM_PER_RANK * local_size
    free = shutil.disk_usage(_SHM).free
    if free < needed:
        raise ValueError(
            f"{_SHM} has {free >> 20} MB free, and {local_size} ranks need about {needed >> 20} MB: remove what "
            "dead runs left there (deepspeed_allreduce_buffer_*), or give the container more (--shm-size)"
        )
