"""Symmetric cross-entropy over the global batch, with logits that need not be the gradient's own similarities.

    z_ij = s (v_i.t_j + m_ij)  (i != j),    z_ii = s v_i.t_i,    L = 1/2 [CE(z, y) + CE(z^T, y)],    y_i = i

No gradient flows through the margin m. As it is linear in features (`margin.py`), `z_ij = s (left_i.right_j + c)`. With
r and k the log-sum-exp of rows and columns,

    A_ij = (1/2N) [exp(z_ij - r_i) + exp(z_ij - k_j) - 2 [i = j]]
    dL/dv = s A t,    dL/dt = s A^T v,    dL/ds = sum_ij A_ij z_ij / s

The decoupled form (Yeh et al., arXiv 2110.06848) leaves the positive out of r and k, and so cannot saturate.

All inputs are known in the forward pass, so it computes the gradients there and keeps only them: 2nD + 1 numbers.

Between W ranks (n pairs each, N = Wn) every entry of z is computed once in the world, by the rank of its image:

    forward   all_gather of t [N, D] in the dtype of the features, and of the N positives (and ids)
              all_reduce MAX and all_reduce SUM of N column statistics; 8 integers, to agree on the sizes
    gradient  reduce_scatter SUM of dL/dt [N, D]; none in backward
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.exchange import Exchange
from pipeline.objective.inputs import Inputs, Wanted, agree, wanted_gradients
from pipeline.objective.margin import Margin
from pipeline.objective.monitor import Monitor
from pipeline.objective.tiles import Logits, Tiles

DEFAULT_MEMORY_BUDGET = 256 * 2**20


class Settings(NamedTuple):
    """How to compute the loss.

    Attributes:
        margin: what is added to the cosine of a negative.
        decoupled: leave the positive out of the denominators.
        budget: bytes for logits.
    """

    margin: Margin
    decoupled: bool = False
    budget: int = DEFAULT_MEMORY_BUDGET


def contrastive_loss(
    inputs: Inputs, settings: Settings, group: dist.ProcessGroup | None = None, monitor: Monitor | None = None
) -> Tensor:
    """Mean loss of the global batch, the same on every rank.

    After the averaging over ranks of DDP or DeepSpeed its gradient is that of the concatenated batch in one process.

    Args:
        inputs: this rank's pairs.
        settings: which loss.
        group: the ranks that share the global batch; None for the default group.
        monitor: is told how saturated the loss is.

    Raises:
        ValueError: on every rank, if the inputs of any rank cannot be used.
    """
    exchange = Exchange(group)
    wanted = wanted_gradients(inputs)
    of_images = settings.margin.of_images
    # The gradient of the columns takes a collective, so it is computed if it is wanted on any rank.
    columns_wanted = agree(exchange, inputs, wanted.image if of_images else wanted.text)
    if of_images:
        inputs = inputs._replace(image=inputs.text, text=inputs.image)
        wanted = Wanted(wanted.text, wanted.image, wanted.scale)
    wanted = wanted._replace(text=columns_wanted)
    # The logits are computed in float32 at least, whatever autocast says: bfloat16 is off by 0.1 at a scale of 100.
    with torch.autocast(inputs.image.device.type, enabled=False):
        return _ContrastiveLoss.apply(*inputs[:3], inputs, settings, exchange, wanted, monitor)


class _ContrastiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        inputs: Inputs,
        settings: Settings,
        exchange: Exchange,
        wanted: Wanted,
        monitor: Monitor | None,
    ) -> Tensor:
        margin, (n, D) = settings.margin, image.shape
        exact = torch.float64 if image.dtype == torch.float64 else torch.float32
        v, t, s = image.to(exact), text.to(exact), scale.reshape(()).to(image.device, exact)
        t0 = inputs.frozen_text_features if margin.frozen else None
        right = exchange.gather(margin.right(text, t0)).to(exact)
        own = slice(exchange.rank * n, (exchange.rank + 1) * n)
        left = margin.left(v, t, None if t0 is None else right[own, D:])
        logits = Logits(left, right, s, own.start, _masks(inputs, exchange))
        tiles = Tiles(logits, settings.budget, keep=wanted.any)
        # A constant on all negatives is one on the positives, with the other sign: the tiles need not know it.
        cosine = (v * t).sum(1) - margin.offset(right[:, :D])
        pairs = _compare(tiles, s * cosine, exchange, settings.decoupled)
        row_loss, row_slope = _pair_losses(pairs.row_gap, settings.decoupled)
        column_loss, column_slope = _pair_losses(pairs.column_gap, settings.decoupled)
        num_pairs = right.shape[0]
        loss = (pairs.row_loss_total + column_loss.sum()) / (2 * num_pairs)
        ctx.dtypes = image.dtype, text.dtype, scale.dtype
        ctx.scale_like = scale.shape, scale.device
        dv = dt = ds = None
        if wanted.any:
            diagonal = -(row_slope + column_slope[own])
            by_row, dt = tiles.gradients(
                row_lse=s * cosine + row_loss,
                column_lse=pairs.positives + column_loss,
                diagonal=diagonal,
                image=v if wanted.text else None,
                text=right if wanted.scale else right[:, :D] if wanted.image else None,
            )
            # DDP and DeepSpeed average over the ranks what is a sum over them: hence the factor `size`.
            factor = exchange.size / (2 * num_pairs)
            if by_row is not None and wanted.scale:
                # sum_ij A_ij left_i.right_j is at hand as left_i.(A right)_i; on the diagonal the logit is another.
                excess = (left * right[own]).sum(1) - cosine
                ds = factor * ((left * by_row).sum() - (diagonal * excess).sum())
            dv = by_row[:, :D].contiguous().mul_(s * factor) if by_row is not None and wanted.image else None
            dt = exchange.scatter_total(dt).mul_(s * factor) if dt is not None else None
            ctx.save_for_backward(dv, dt, ds)
        if monitor is not None:
            monitor.record(pairs.row_gap, pairs.column_gap[own], pairs.lead / s, pairs.entropy, (dv, dt), image.dtype)
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


def _masks(inputs: Inputs, exchange: Exchange) -> tuple[tuple[Tensor, Tensor], ...]:
    """The keys that `Logits` compares; none where no key repeats, which spares a comparison per logit."""
    gathered = [(keys, exchange.gather(keys)) for keys in inputs.keys]
    return tuple((keys, all_keys) for keys, all_keys in gathered if all_keys.unique().numel() < all_keys.numel())


def _pair_losses(gap: Tensor, decoupled: bool) -> tuple[Tensor, Tensor]:
    """The losses of pairs whose negatives are `gap` above their positives, and the derivatives; 0 without negatives.

    `log(1 + exp(gap))`, or the gap itself when decoupled. torch's softplus cuts off at 20, too early for float64.
    """
    if decoupled:
        has_negative = gap > -torch.inf
        return gap.where(has_negative, 0.0), has_negative.to(gap.dtype)
    return torch.logaddexp(gap, gap.new_zeros(())), gap.sigmoid()


class _Pairs(NamedTuple):
    """Positives against their negatives: of this rank's rows `[n]`, and of all columns `[N]`.

    Attributes:
        row_gap: log-sum-exp of the negatives of a row above its positive; `-inf` without any.
        column_gap: that of all columns.
        positives: logits of the positives of all columns.
        row_loss_total: sum of the losses of the rows of all ranks `[]`.
        lead: positive of a row above its hardest negative.
        entropy: of the softmax over the negatives, for the rows that are monitored.
    """

    row_gap: Tensor
    column_gap: Tensor
    positives: Tensor
    row_loss_total: Tensor
    lead: Tensor
    entropy: Tensor


def _compare(tiles: Tiles, positive: Tensor, exchange: Exchange, decoupled: bool) -> _Pairs:
    positives = exchange.gather(positive)
    local = tiles.statistics()
    row_gap = local.row_lse - positive
    maximum = exchange.maximum(local.column.maximum)
    # The losses of the rows travel with the column sums, to spare a collective.
    row_loss = _pair_losses(row_gap, decoupled)[0].sum()
    sums = exchange.total(torch.cat([local.column.above(maximum), row_loss[None]]))
    column_gap = maximum + sums[:-1].log() - positives
    return _Pairs(row_gap, column_gap, positives, sums[-1], positive - local.row_max, local.entropy)
