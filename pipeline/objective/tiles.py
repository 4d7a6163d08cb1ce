"""The kernel: log-sum-exp statistics and gradients of N x N logits, a strip of rows at a time.

Shapes: n pairs on this rank, N in the global batch, K the width of what makes the logits. Rows are this rank's images,
columns the captions of all ranks. The logits of the strip are the only matrices of width N, and a byte budget bounds
them.

The diagonal, which holds the positive pairs, is kept out of the strips. So the loss of a pair is `softplus(lse of its
negatives - its positive)`, which keeps its relative accuracy where the loss is far below the rounding error of the
logits, and cross-entropy and its gradient in float32 read zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.objective.exponentials import (
    Columns,
    add_columns,
    share_exponentials,
    weigh_separately,
    weigh_shared,
)

# What is left of the budget after the scratch is shared by so many strips: one that is at work, and others whose logits
# are kept between the passes.
STRIPS_IN_BUDGET = 4
# On a CPU, elementwise work goes block by block, so that a block and its scratch stay in the cache.
CACHED_BLOCK_BYTES = 2 * 2**20
# The monitor sees the entropy of so many rows of a rank.
MONITORED_ROWS = 256


@dataclass(frozen=True)
class Logits:
    """`z_ij = scale * left_i . right_j` for the negatives i, j; the positives are no concern of the kernel.

    Attributes:
        left: `[n, K]`, the images, with the margin beside or added where it is linear in features.
        right: `[N, K]`.
        scale: `[]`.
        first: column of the positive of row 0.
        masks: pairs of `[n]` and `[N]` int64; a row and a column with equal keys are no negatives, and count as `-inf`.
    """

    left: Tensor
    right: Tensor
    scale: Tensor
    first: int
    masks: tuple[tuple[Tensor, Tensor], ...] = ()

    def negatives(self, rows: slice, out: Tensor) -> Tensor:
        """Logits of some rows `[b, N]`, written to `out`, with `-inf` for whatever is not a negative."""
        torch.mm(self.left[rows] * self.scale, self.right.T, out=out)
        self.diagonal(out, rows).fill_(-torch.inf)
        for row_keys, column_keys in self.masks:
            out.masked_fill_(row_keys[rows, None] == column_keys, -torch.inf)
        return out

    def diagonal(self, strip: Tensor, rows: slice) -> Tensor:
        """The entries `[b]` of a strip that belong to the positive pairs, as a view."""
        return strip.diagonal(self.first + rows.start)


@dataclass(frozen=True)
class Statistics:
    """Of the negatives of this rank's rows, and of this rank's part of all columns.

    Attributes:
        row_max: `[n]`, the hardest negative; `-inf` where there is none.
        row_lse: `[n]`, log-sum-exp.
        column: log-sum-exp of the columns `[N]`, as a maximum and a sum, which other ranks' parts can join.
        entropy: `[min(n, MONITORED_ROWS)]`, of the softmax over the negatives of the first rows.
    """

    row_max: Tensor
    row_lse: Tensor
    column: Columns
    entropy: Tensor


class Tiles:
    """One evaluation of the logits in strips: first `statistics`, then, once, `gradients`.

    The second pass reads what the budget let the first one keep, and computes the rest again, by the same operations,
    so that the probabilities of a row sum to 1.

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
        height = -(-n // -(-n // height))  # as many strips, of equal height
        self.logits = logits
        self.strips = [slice(start, min(start + height, n)) for start in range(0, n, height)]
        fits = len(self.strips) <= STRIPS_IN_BUDGET
        self._num_kept = 0 if not keep else len(self.strips) if fits else STRIPS_IN_BUDGET - 1
        self._kept: list[Tensor] = []
        self._tops: list[Tensor | None] = []
        self._scratch = logits.left.new_empty(min(height, max(1, scratch_bytes // row_bytes)), N)
        self._buffer = logits.left.new_empty(height, N) if self._num_kept < len(self.strips) else None

    def statistics(self) -> Statistics:
        """First pass."""
        rows_like = self.logits.left.new_empty(self.logits.left.shape[0])
        self._row_max, row_lse = torch.empty_like(rows_like), torch.empty_like(rows_like)
        entropy = torch.empty_like(rows_like[:MONITORED_ROWS])
        column = Columns.none(self.logits.right)
        for index, rows in enumerate(self.strips):
            strip = self.logits.negatives(rows, out=self._place(index))
            blocks = list(self._blocks(rows, strip))
            part = share_exponentials(blocks, self._row_max, row_lse, entropy)
            if part is None:  # logits too far apart: the exponentials of the rows do not serve the columns
                self.logits.negatives(rows, out=strip)
                column = add_columns(blocks, column)
            else:
                column = column.joined(part.normalised())
            self._tops.append(None if part is None else part.top)
            if index < self._num_kept:
                self._kept.append(strip)
        return Statistics(self._row_max, row_lse, column, entropy)

    def gradients(
        self, row_lse: Tensor, column_lse: Tensor, diagonal: Tensor, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Second pass: `A text` and `A^T image` for `A_ij = exp(z_ij - row_lse_i) + exp(z_ij - column_lse_j)`.

        Args:
            row_lse: `[n]`, log-sum-exp of the rows, the positive included.
            column_lse: `[N]`, that of the columns.
            diagonal: `[n]`, A on the diagonal.
            image: `[n, D]`, or None to leave out `A^T image`.
            text: `[N, T]`, or None to leave out `A text`.

        Returns:
            `[n, T]` and, summed over this rank's rows only, `[N, D]`.
        """
        by_row = None if text is None else text.new_empty(row_lse.shape[0], text.shape[1])
        by_column = None if image is None else image.new_zeros(column_lse.shape[0], image.shape[1])
        for index, rows in enumerate(self.strips):
            kept, top = index < self._num_kept, self._tops[index]
            A = self._kept[index] if kept else self.logits.negatives(rows, out=self._place(index))
            blocks = self._blocks(rows, A)
            if top is None:
                weigh_separately(blocks, row_lse, column_lse)
            else:
                weigh_shared(blocks, self._row_max, row_lse, column_lse, top, exponentials_at_hand=kept)
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
