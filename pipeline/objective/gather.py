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


def gather_summed(rows: Tensor, exchange: Exchange, dtype: torch.dtype) -> Tensor:
    """Rows `[n, ...]` of every rank, in another dtype: `[N, ...]`, of which every rank computes another part of a loss.

    A rank's gradient is then a part as well: they travel, in that dtype, and are summed.
    """
    gathered: Tensor = _GatherSummed.apply(rows, exchange, dtype)
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


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, dtype: torch.dtype) -> Tensor:
        ctx.exchange, ctx.dtype = exchange, rows.dtype
        return exchange.gather(rows).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return ctx.exchange.scatter_total(gradient).to(ctx.dtype), None, None
