"""The kernel: log-sum-exp statistics and gradients of N x N logits, a strip of rows at a time.

Shapes: n pairs on this rank, N in the global batch, D the embedding width. Rows are this rank's images, columns the
captions of all ranks. The logits of the strip are the only matrices of width N, and a byte budget bounds them.

The diagonal, which holds the positive pairs, is kept out of the strips and has logits of its own. So the loss of a pair
is `softplus(lse of its negatives - its positive)`, which keeps its relative accuracy where the loss is far below the
rounding error of the logits, and cross-entropy and its gradient in float32 read zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# What is left of the budget after the scratch is shared by so many strips: one that is at work, and others whose logits
# are kept between the passes.
STRIPS_IN_BUDGET = 4
# On a CPU, elementwise work goes block by block, so that a block and its scratch stay in the cache.
CACHED_BLOCK_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Logits:
    """`z_ij = scale * left_i . right_j` off the diagonal, `positive_i` on it.

    Attributes:
        left: `[n, D]`, whatever multiplies the columns: the images, plus the margin where it is linear in features.
        right: `[N, D]`.
        positive: `[n]`, the logits of the positive pairs, scale included.
        scale: `[]`.
        first: column of the positive of row 0.
        row_ids: `[n]` int64, or None. A negative whose ids are equal counts as `-inf`.
        column_ids: `[N]` int64, or None.
    """

    left: Tensor
    right: Tensor
    positive: Tensor
    scale: Tensor
    first: int
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None

    def negatives(self, rows: slice, out: Tensor) -> Tensor:
        """Logits of some rows `[b, N]`, written to `out`, with `-inf` for whatever is not a negative."""
        torch.mm(self.left[rows] * self.scale, self.right.T, out=out)
        self.diagonal(out, rows).fill_(-torch.inf)
        if self.row_ids is not None and self.column_ids is not None:
            out.masked_fill_(self.row_ids[rows, None] == self.column_ids, -torch.inf)
        return out

    def diagonal(self, strip: Tensor, rows: slice) -> Tensor:
        """The entries `[b]` of a strip that belong to the positive pairs, as a view."""
        return strip.diagonal(self.first + rows.start)


@dataclass(frozen=True)
class Statistics:
    """Maximum and `sum exp(z - maximum)` over the negatives, of this rank's rows `[n]` and of all columns `[N]`.

    The maximum includes the positive, so it is finite; the sum does not, so it is 0 where there is no negative.
    """

    row_max: Tensor
    row_sum: Tensor
    column_max: Tensor
    column_sum: Tensor


class Tiles:
    """One evaluation of the logits in strips: first `statistics`, then, once, `gradients`.

    The second pass reads the logits that the budget let the first one keep, and computes the others again, by the same
    operations, so that the probabilities of a row sum to 1.

    Args:
        logits: what to evaluate.
        budget: bytes for everything of width N. One strip has at least one row, whatever the budget.
        keep: whether a second pass will follow.
    """

    def __init__(self, logits: Logits, budget: int, keep: bool) -> None:
        n, N = logits.left.shape[0], logits.right.shape[0]
        row_bytes = N * logits.left.element_size()
        scratch_bytes = budget // 4
        if logits.left.device.type == "cpu":
            scratch_bytes = min(scratch_bytes, CACHED_BLOCK_BYTES)
        height = min(n, max(1, (budget - scratch_bytes) // (STRIPS_IN_BUDGET * row_bytes)))
        self.logits = logits
        self.strips = [slice(start, min(start + height, n)) for start in range(0, n, height)]
        fits = len(self.strips) <= STRIPS_IN_BUDGET
        self._num_kept = 0 if not keep else len(self.strips) if fits else STRIPS_IN_BUDGET - 1
        self._kept: list[Tensor] = []
        self._scratch = logits.left.new_empty(min(height, max(1, scratch_bytes // row_bytes)), N)
        self._buffer = logits.left.new_empty(height, N) if self._num_kept < len(self.strips) else None

    def statistics(self, column_floor: Tensor) -> Statistics:
        """First pass.

        A fixed shift in place of the running maximum would under- or overflow at a scale of 100.

        Args:
            column_floor: `[N]`, the positives of the columns.
        """
        positive = self.logits.positive
        row_max, row_sum = torch.empty_like(positive), torch.empty_like(positive)
        column_max, column_sum = column_floor, torch.zeros_like(column_floor)
        for index, rows in enumerate(self.strips):
            strip = self.logits.negatives(rows, out=self._place(index))
            if index < self._num_kept:
                self._kept.append(strip)
            for block, z, scratch in self._blocks(rows, strip):
                row_max[block] = maximum = torch.maximum(z.amax(1), positive[block])
                row_sum[block] = torch.sub(z, maximum[:, None], out=scratch).exp_().sum(1)
                maximum = torch.maximum(z.amax(0), column_max)
                column_sum *= (column_max - maximum).exp_()
                column_sum += torch.sub(z, maximum, out=scratch).exp_().sum(0)
                column_max = maximum
        return Statistics(row_max, row_sum, column_max, column_sum)

    def gradients(
        self, row_lse: Tensor, column_lse: Tensor, diagonal: Tensor, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Second pass: `A text` and `A^T image` for `A_ij = exp(z_ij - row_lse_i) + exp(z_ij - column_lse_j)`.

        Args:
            row_lse: `[n]`, log-sum-exp of the rows, the positive included.
            column_lse: `[N]`, that of the columns.
            diagonal: `[n]`, A on the diagonal.
            image: `[n, D]`, or None to leave out `A^T image`.
            text: `[N, D]`, or None to leave out `A text`.

        Returns:
            `[n, D]` and, summed over this rank's rows only, `[N, D]`.
        """
        by_row = None if text is None else torch.empty_like(self.logits.left)
        by_column = None if image is None else torch.zeros_like(self.logits.right)
        for index, rows in enumerate(self.strips):
            kept = index < self._num_kept
            A = self._kept[index] if kept else self.logits.negatives(rows, out=self._place(index))
            for block, z, scratch in self._blocks(rows, A):
                torch.sub(z, column_lse, out=scratch).exp_()
                z.sub_(row_lse[block, None]).exp_().add_(scratch)
            self.logits.diagonal(A, rows).copy_(diagonal[rows])
            if text is not None and by_row is not None:
                torch.mm(A, text, out=by_row[rows])
            if image is not None and by_column is not None:
                by_column.addmm_(A.T, image[rows])
        return by_row, by_column

    def _blocks(self, rows: slice, strip: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of a strip: which rows, their logits, and scratch of the same shape."""
        height = self._scratch.shape[0]
        for start in range(rows.start, rows.stop, height):
            block = slice(start, min(start + height, rows.stop))
            z = strip[block.start - rows.start : block.stop - rows.start]
            yield block, z, self._scratch[: z.shape[0]]

    def _place(self, index: int) -> Tensor:
        """Where the logits of a strip go: memory of their own if they are kept, else the shared buffer."""
        rows = self.strips[index]
        height = rows.stop - rows.start
        if self._buffer is None or index < self._num_kept:
            return self._scratch.new_empty(height, self._scratch.shape[1])
        return self._buffer[:height]
