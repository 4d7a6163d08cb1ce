"""How saturated a contrastive loss is, from what its kernel knows anyway.

A softmax that has separated its positives from its negatives has no gradient left (arXiv 2608.18521 finds it zero in
float32 in half of its measurements). With the gap g_i = log-sum-exp of the negatives of a row - its positive, the loss
of the row is log(1 + exp(g_i)): plain cross-entropy in float32 reads 0.0 where 1 + exp(g_i) rounds to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.objective.exchange import Exchange

QUANTILES = (0.05, 0.5, 0.95)


class Monitor:
    """Remembers a few numbers per pair of the last evaluation of a loss; turns them into figures when asked."""

    def __init__(self) -> None:
        self._last: _Record | None = None

    def record(
        self,
        row_gap: Tensor,
        column_gap: Tensor,
        lead: Tensor,
        entropy: Tensor,
        gradients: tuple[Tensor | None, ...],
        feature_dtype: torch.dtype,
    ) -> None:
        """Called by the loss, without any collective.

        Args:
            row_gap: `[n]`, log-sum-exp of the negatives of an image minus its positive.
            column_gap: `[n]`, that of the captions of this rank.
            lead: `[n]`, positive minus hardest negative, in units of cosine.
            entropy: `[k]`, of the softmax over the negatives, for the first rows.
            gradients: with respect to the features `[n, D]`, times the number of ranks; None where not computed.
            feature_dtype: of the features; the gap has that of the logits.
        """
        sizes = [_size(gradient) for gradient in gradients if gradient is not None]
        largest, square = torch.stack(sizes).unbind(1) if sizes else row_gap.new_zeros(2, 1, dtype=torch.float64)
        self._last = _Record(
            row_gap, column_gap, lead, entropy.exp().mean(), largest.amax(), square.sum(), feature_dtype
        )

    def figures(self, exchange: Exchange) -> dict[str, float | str]:
        """Figures over the global batch, the same on every rank; empty before the first evaluation.

        A collective of all ranks. See `MarginLoss.saturation` for what each figure means.
        """
        if self._last is None:
            return {}
        last = self._last
        n = last.row_gap.shape[0]
        numbers = torch.stack([last.effective_negatives.double(), last.largest_gradient, last.square_gradient])
        local = torch.cat([last.row_gap, last.column_gap, last.lead]).double()
        ranks = exchange.gather(torch.cat([local, numbers])[None])
        row_gap, column_gap, lead = ranks[:, : 3 * n].unflatten(1, (3, n)).unbind(1)
        effective, largest, square = ranks[:, 3 * n :].unbind(1)
        quantiles = torch.quantile(lead.flatten(), lead.new_tensor(QUANTILES), interpolation="lower")
        return {
            "zero_rows": _share_read_as_zero(row_gap),
            "zero_columns": _share_read_as_zero(column_gap),
            **{f"gap_q{100 * q:02.0f}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
            "effective_negatives": float(effective.mean()),
            "max_feature_grad": float(largest.max()) / exchange.size,
            "feature_grad_norm": float(square.sum().sqrt()) / exchange.size,
            "dtype": "/".join(str(dtype).removeprefix("torch.") for dtype in (last.feature_dtype, last.row_gap.dtype)),
        }


class _Record(NamedTuple):
    row_gap: Tensor
    column_gap: Tensor
    lead: Tensor
    effective_negatives: Tensor
    largest_gradient: Tensor
    square_gradient: Tensor
    feature_dtype: torch.dtype


def _size(gradient: Tensor) -> Tensor:
    """Largest absolute value and sum of squares, float64 `[2]`. Squares of what is below 1e-19 vanish in float32."""
    largest = torch.stack(torch.aminmax(gradient)).abs().amax()
    relative = torch.linalg.vector_norm(gradient / largest.clamp(min=torch.finfo(largest.dtype).tiny))
    return torch.stack([largest.double(), (largest.double() * relative.double()).square()])


def _share_read_as_zero(gap: Tensor) -> float:
    """The share of pairs whose loss plain cross-entropy in float32 reads as 0.0."""
    return float((1 + gap.float().exp() == 1).double().mean())
