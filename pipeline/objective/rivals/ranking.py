"""Hinges and regressions on differences of cosines; the temperature plays no part.

    VSE++           sum_i [m + max_j S_ij - S_ii]_+,    or the sum over all j in place of the maximum
    adaptive twin   the same with m + S_ij replaced by gamma G_ij + S_ij,    G = stopgrad(t t^T)
    ARM             mean_ij ((S_ii - S_ij) - (1 + D_ij) / 2)^2,    D the cosines of the candidates

j runs over the negatives of i. Each is the sum of both directions for the hinges, and their average for ARM.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from pipeline.objective.base import refuse_unless
from pipeline.objective.rivals.base import Directed, Pairs, Rival, check_number, directions, lowest


def _hinges(margin: Tensor | float, batch: Directed, hardest: bool) -> Tensor:
    """`[margin_ij + S_ij - S_ii]_+`, of the hardest negative of a row or of all, summed over the rows."""
    violation = (margin + batch.S - batch.positive[:, None]).masked_fill(~batch.negative, lowest(batch.S))
    return (violation.amax(1) if hardest else violation).clamp(min=0).sum()


class VseLoss(Rival):
    """VSE++ (arXiv 1707.05612). A sum over the pairs, as in the paper: it grows with the batch.

    Args:
        m: the margin, in units of cosine.
        hardest: only the hardest negative counts, which is the paper's contribution; else all of them.
        group: see `Rival`.
    """

    def __init__(self, m: float = 0.2, hardest: bool = True, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.m = check_number("m", m, low=0.0)
        refuse_unless(isinstance(hardest, bool), f"hardest must be true or false, not {hardest!r}")
        self.hardest = hardest

    def loss(self, pairs: Pairs) -> Tensor:
        """Both directions, summed over the pairs."""
        first, second = (_hinges(self.margin(pairs), batch, self.hardest) for batch in directions(pairs))
        return first + second

    def margin(self, pairs: Pairs) -> Tensor | float:
        """The same for all negatives."""
        return self.m


class AdaptiveVseLoss(VseLoss):
    """VSE++ with HN-CLIP's margin, its natural twin: `gamma G_ij` in place of m.

    Args:
        gamma: strength of the margin. The default makes a negative with an equal caption as hard as in VSE++.
        hardest: as in `VseLoss`.
        group: see `Rival`.
    """

    def __init__(self, gamma: float = 0.2, hardest: bool = True, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(0.0, hardest, group)
        self.gamma = check_number("gamma", gamma)

    def margin(self, pairs: Pairs) -> Tensor:
        """`gamma G_ij`, symmetric."""
        t = pairs.t.detach()
        return self.gamma * (t @ t.T)


class AdaptiveRelevanceMarginLoss(Rival):
    """ARM (arXiv 2407.21515): regress the lead of the positive on how much a negative differs from it.

    The candidates' own cosines D (captions for an image, images for a caption) set the target, larger for more similar
    ones. As in its public code, gradients flow through the target.
    """

    def loss(self, pairs: Pairs) -> Tensor:
        """Mean over the negatives, both directions averaged."""
        total = pairs.S.new_zeros(())
        for batch, candidates in zip(directions(pairs), (pairs.t, pairs.v), strict=True):
            target = (1 + candidates @ candidates.T) / 2
            error = (batch.positive[:, None] - batch.S - target).square().masked_fill(~batch.negative, 0.0)
            total = total + error.sum() / batch.negative.sum().clamp(min=1)
        return total / 2
