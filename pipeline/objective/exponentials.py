"""What happens to the logits of a strip between the matrix products: one exponential for rows and columns, or two.

With m_i the largest logit of row i, e_ij = exp(z_ij - m_i), and M the largest m_i of the strip, one exponential gives
both log-sum-exps, and with their finished values r and k both terms of the gradient:

    r_i = m_i + log sum_j e_ij,    k_j = M + log sum_i w_i e_ij,    w_i = exp(m_i - M)
    exp(z_ij - r_i) + exp(z_ij - k_j) = e_ij (exp(m_i - r_i) + w_i exp(M - k_j))

This holds for a column unless its largest logit is so far below M (about 64 in float32, 0.64 cosine units at a scale of
100) that what underflows is more than a rounding error of its sum. A strip with such a column takes two exponentials
with a shift of their own per row and per column. A fixed shift for all would under- or overflow at a scale of 100.

A block is (which rows, their logits z `[b, N]`, scratch `[b, N]`). "-inf" marks whatever is not a negative.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Block = tuple[slice, Tensor, Tensor]


class Columns(NamedTuple):
    """`maximum + log(total)` is the log-sum-exp of the columns `[N]` over some rows; the maximum is finite."""

    maximum: Tensor
    total: Tensor

    @classmethod
    def none(cls, right: Tensor) -> Columns:
        """Over no rows."""
        return cls(right.new_full(right.shape[:1], torch.finfo(right.dtype).min), right.new_zeros(right.shape[0]))

    def joined(self, other: Columns) -> Columns:
        """Over the rows of both."""
        maximum = torch.maximum(self.maximum, other.maximum)
        return Columns(maximum, self.above(maximum) + other.above(maximum))

    def above(self, maximum: Tensor) -> Tensor:
        """The sums relative to another maximum."""
        return self.total * (self.maximum - maximum).exp()


class SharedColumns(NamedTuple):
    """Column sums `[N]` relative to one maximum `[]` for all columns."""

    top: Tensor
    total: Tensor

    def normalised(self) -> Columns:
        """With maxima that tell how large each column is, which `joined` compares."""
        maximum = self.top + self.total.log()
        return Columns(maximum, self.total * (self.top - maximum).exp())


def share_exponentials(
    blocks: Iterable[Block], row_max: Tensor, row_lse: Tensor, entropy: Tensor
) -> SharedColumns | None:
    """Turn z into `exp(z - row maximum)` in place, and fill in the row statistics.

    Returns:
        The column sums of the strip, or None where they would be inexact; the row statistics are good in any case.
    """
    limits = torch.finfo(row_max.dtype)
    top = row_max.new_tensor(limits.min)
    total: Tensor | float = 0.0
    num_rows = 0
    for rows, z, _ in blocks:
        maximum = torch.amax(z, 1)
        shift = maximum.clamp_min(limits.min)  # finite without any negative
        row_sum = z.sub_(shift[:, None]).exp_().sum(1)
        row_max[rows], row_lse[rows] = maximum, shift + row_sum.log()
        _fill_entropy(entropy, rows, z, row_sum)
        new_top = torch.maximum(top, shift.amax())
        total = total * (top - new_top).exp() + z.T @ (shift - new_top).exp()
        top, num_rows = new_top, num_rows + z.shape[0]
    assert isinstance(total, Tensor)
    if total.amin() < num_rows * limits.tiny / limits.eps:
        return None
    return SharedColumns(top, total)


def add_columns(blocks: Iterable[Block], column: Columns) -> Columns:
    """Column sums with a shift of its own for every column."""
    for _, z, scratch in blocks:
        maximum = torch.maximum(z.amax(0), column.maximum)
        total = torch.sub(z, maximum, out=scratch).exp_().sum(0)
        column = Columns(maximum, column.above(maximum) + total)
    return column


def weigh_shared(
    blocks: Iterable[Block],
    row_max: Tensor,
    row_lse: Tensor,
    column_lse: Tensor,
    top: Tensor,
    exponentials_at_hand: bool,
) -> None:
    """Turn z, or the exponentials of `share_exponentials`, into `exp(z - row_lse) + exp(z - column_lse)` in place."""
    lowest = torch.finfo(row_max.dtype).min
    by_column = (top - column_lse).exp_()
    for rows, z, scratch in blocks:
        shift = row_max[rows].clamp_min(lowest)
        if not exponentials_at_hand:
            z.sub_(shift[:, None]).exp_()
        by_row, weight = (shift - row_lse[rows]).exp_(), (shift - top).exp_()
        z.mul_(torch.addcmul(by_row[:, None], weight[:, None], by_column, out=scratch))


def weigh_separately(blocks: Iterable[Block], row_lse: Tensor, column_lse: Tensor) -> None:
    """The same from z, with two exponentials."""
    for rows, z, scratch in blocks:
        torch.sub(z, column_lse, out=scratch).exp_()
        z.sub_(row_lse[rows, None]).exp_().add_(scratch)


def _fill_entropy(entropy: Tensor, rows: slice, e: Tensor, row_sum: Tensor) -> None:
    """`H = log sum e - (sum e log e) / sum e` of the rows that are monitored; `-inf` without any negative."""
    num_rows = min(rows.stop, entropy.shape[0]) - rows.start
    if num_rows > 0:
        total = row_sum[:num_rows]
        H = total.log() + torch.special.entr(e[:num_rows]).sum(1) / total
        entropy[rows.start : rows.start + num_rows] = H.where(total > 0, -torch.inf)
