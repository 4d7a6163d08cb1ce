"""The collectives of the contrastive objectives.

Only collectives that gloo (CPU) and nccl (CUDA) both have. Every method is a collective: all ranks of the group call it
in the same order, with tensors of equal shape and dtype. Without a process group there is one rank and nothing moves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The ranks that share one global batch: `size` of them, this one being number `rank`.

    Args:
        group: process group; None for the default group, or for a single process where none is initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.size = dist.get_world_size(group) if distributed else 1
        self.rank = dist.get_rank(group) if distributed else 0
        if self.rank < 0:
            raise ValueError("this rank is not a member of the process group of the objective")

    def gather(self, rows: Tensor) -> Tensor:
        """Rows `[n, ...]` of every rank, in the order of the ranks: `[size * n, ...]`."""
        if self.size == 1:
            return rows
        gathered = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self.group)
        return gathered

    def maximum(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def scatter_total(self, rows: Tensor) -> Tensor:
        """This rank's `[n, ...]` of the sum over the ranks of `rows` `[size * n, ...]`."""
        if self.size == 1:
            return rows
        own = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        dist.reduce_scatter_tensor(own, rows.contiguous(), op=dist.ReduceOp.SUM, group=self.group)
        return own

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced
