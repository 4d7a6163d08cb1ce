"""Symmetric cross-entropy over the global batch, with logits that need not be the gradient's own similarities.

    z_ij = s left_i . t_j  (i != j),    z_ii = s v_i . t_i,    L = 1/2 [CE(z, y) + CE(z^T, y)],    y_i = i

A margin is whatever makes `left` differ from the images: it moves the logits, and no gradient flows through it. With r
and k the log-sum-exp of rows and columns,

    A_ij = (1/2N) [exp(z_ij - r_i) + exp(z_ij - k_j) - 2 [i = j]]
    dL/dv = s A t,    dL/dt = s A^T v,    dL/ds = sum_ij A_ij z_ij / s

All inputs are known in the forward pass, so it computes the gradients there and keeps only them: 2nD + 1 numbers.

Between W ranks (n pairs each, N = Wn) every entry of z is computed once in the world, by the rank of its image:

    forward   all_gather of t [N, D] in the dtype of the features, and of the N positives (and ids)
              all_reduce MAX and all_reduce SUM of N column statistics; 6 integers, to agree on the sizes
    gradient  reduce_scatter SUM of dL/dt [N, D]; none in backward
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.exchange import Exchange
from pipeline.objective.inputs import Wanted, agree, wanted_gradients
from pipeline.objective.tiles import Logits, Tiles


def contrastive_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    gamma: float,
    ids: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    budget: int = 2**28,
) -> Tensor:
    """Mean loss of the global batch, the same on every rank.

    After the averaging over ranks of DDP or DeepSpeed its gradient is that of the concatenated batch in one process.

    Args:
        image: `[n, D]`, normalised.
        text: `[n, D]`, normalised.
        scale: `[]` or `[1]`, the inverse temperature.
        gamma: strength of the margin; 0 is InfoNCE.
        ids: `[n]` int64; pairs of the global batch with equal id are no negatives of each other.
        group: the ranks that share the global batch; None for the default group.
        budget: bytes for logits.

    Raises:
        ValueError: on every rank, if the inputs of any rank cannot be used.
    """
    exchange = Exchange(group)
    wanted = agree(exchange, image, text, scale, ids, wanted_gradients(image, text, scale))
    # The logits are computed in float32 at least, whatever autocast says: bfloat16 is off by 0.1 at a scale of 100.
    with torch.autocast(image.device.type, enabled=False):
        return _ContrastiveLoss.apply(image, text, scale, gamma, ids, exchange, budget, wanted)


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        gamma: float,
        ids: Tensor | None,
        exchange: Exchange,
        budget: int,
        wanted: Wanted,
    ) -> Tensor:
        exact = torch.float64 if image.dtype == torch.float64 else torch.float32
        v, t, s = image.to(exact), text.to(exact), scale.reshape(()).to(image.device, exact)
        cosine = (v * t).sum(1)
        logits = Logits(
            # The margin for free: v.t + gamma t.t = (v + gamma t).t.
            left=v if gamma == 0 else torch.add(v, t, alpha=gamma),
            right=exchange.gather(text).to(exact),
            positive=s * cosine,
            scale=s,
            first=exchange.rank * image.shape[0],
            **_mask(ids, exchange),
        )
        tiles = Tiles(logits, budget, keep=bool(wanted))
        row_gap, column_gap, positives, row_total = _gaps(tiles, exchange)
        row_loss, column_loss = _softplus(row_gap), _softplus(column_gap)
        num_pairs = positives.shape[0]
        loss = (row_total + column_loss.sum()) / (2 * num_pairs)
        ctx.dtypes = image.dtype, text.dtype, scale.dtype
        ctx.scale_like = scale.shape, scale.device
        if not wanted:
            return loss

        own = slice(logits.first, logits.first + image.shape[0])
        diagonal = -(row_gap.sigmoid() + column_gap[own].sigmoid())
        dv, dt = tiles.gradients(
            row_lse=logits.positive + row_loss,
            column_lse=positives + column_loss,
            diagonal=diagonal,
            image=v if wanted.text else None,
            text=logits.right if wanted.image or wanted.scale else None,
        )
        # DDP and DeepSpeed average over the ranks what is a sum over them: hence the factor `size`.
        factor = exchange.size / (2 * num_pairs)
        ds = None
        if dv is not None and wanted.scale:
            # sum_ij A_ij left_i.t_j is at hand as left_i.(A t)_i; on the diagonal the logit is v_i.t_i instead.
            excess = (logits.left * t).sum(1) - cosine
            ds = factor * ((logits.left * dv).sum() - (diagonal * excess).sum())
        dv = dv.mul_(s * factor) if dv is not None and wanted.image else None
        dt = exchange.scatter_total(dt).mul_(s * factor) if dt is not None else None
        ctx.save_for_backward(dv, dt, ds)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph=True: the gradients at hand are constants to autograd
            raise RuntimeError("the contrastive loss has no second derivative: call backward without create_graph")
        # Scaled in the dtype of the logits before the cast: a float16 loss scale rescues what float16 would flush.
        dv, dt, ds = ctx.saved_tensors
        image_dtype, text_dtype, scale_dtype = ctx.dtypes
        shape, device = ctx.scale_like
        return (
            None if dv is None else (grad_output * dv).to(image_dtype),
            None if dt is None else (grad_output * dt).to(text_dtype),
            None if ds is None else (grad_output * ds).to(device, scale_dtype).reshape(shape),
            *[None] * 5,
        )


def _mask(ids: Tensor | None, exchange: Exchange) -> dict[str, Tensor]:
    """The ids that `Logits` compares; none where no id repeats, which spares a comparison per logit."""
    if ids is None:
        return {}
    all_ids = exchange.gather(ids)
    if all_ids.unique().numel() == all_ids.numel():
        return {}
    return {"row_ids": ids, "column_ids": all_ids}


def _softplus(gap: Tensor) -> Tensor:
    """`log(1 + exp(gap))`, the loss of a pair; torch's own softplus cuts off at 20, too early for float64."""
    return torch.logaddexp(gap, gap.new_zeros(()))


def _gaps(tiles: Tiles, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far the negatives of a row or column, by their log-sum-exp, are above its positive; `-inf` without any.

    Returns:
        The gaps of this rank's rows `[n]` and of all columns `[N]`, the positives of all columns `[N]`, and the sum of
        the losses of the rows of all ranks `[]`.
    """
    positive = tiles.logits.positive
    positives = exchange.gather(positive)
    local = tiles.statistics(positives)
    row_gap = local.row_max + local.row_sum.log() - positive
    column_max = exchange.maximum(local.column_max)
    column_sum = local.column_sum * (local.column_max - column_max).exp()
    # The losses of the rows travel with the column sums, to spare a collective.
    sums = exchange.total(torch.cat([column_sum, _softplus(row_gap).sum()[None]]))
    column_gap = column_max + sums[:-1].log() - positives
    return row_gap, column_gap, positives, sums[-1]
