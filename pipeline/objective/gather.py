"""The rows of all ranks, differentiable, for losses that every rank computes from the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.objective.exchange import Exchange


def gather_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """Rows `[n, ...]` of every rank, in the order of the ranks: `[N, ...]`.

    For a loss that every rank computes, alike, from all rows. Its gradient is then at hand on every rank, and none
    travels: a rank takes that of its own rows, times the number of ranks, since DDP and DeepSpeed average over the
    ranks, and the other ranks contribute nothing to these rows.
    """
    if exchange.size == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows, exchange)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        return exchange.size * gradient.chunk(exchange.size)[exchange.rank], None
