"""Negatives weighted by their hardness: HN-NCE, HCL and the debiased loss.

With z = s S, B_i the number of negatives of row i, and both directions averaged:

    HN-NCE    -log e^{z_ii} / (alpha e^{z_ii} + sum_j w_ij e^{z_ij}),    w_ij = B_i e^{beta z_ij} / sum_k e^{beta z_ik}
    HCL       -log e^{z_ii} / (e^{z_ii} + N_i),
              N_i = max([sum_j w_ij e^{z_ij} - tau B_i e^{z_ii}] / (1 - tau), B_i e^{-s})
    debiased  HCL with beta = 0, where all w are 1

Sums run over the negatives. All is computed in logarithms: e^z overflows float32 at a scale of 100.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.rivals.base import Directed, Pairs, Rival, check_number, directions, lowest, masked_lse


def _log_weights(z: Tensor, batch: Directed, beta: float) -> Tensor:
    """Log of w_ij: importance weights whose mean over the negatives of a row is 1."""
    num_negatives = batch.num_negatives.clamp(min=1).to(z.dtype)
    return beta * z + (num_negatives.log() - masked_lse(beta * z, batch.negative))[:, None]


class HardNegativeNCELoss(Rival):
    """HN-NCE, of DiHT (arXiv 2301.02280).

    The weights are constants to autograd, as in the family "cross-entropy on z_ij + o_ij with a detached offset o".

    Args:
        alpha: weight of the positive in its own denominator; 1 in the paper.
        beta: how much hard negatives weigh; 0 is InfoNCE, 0.5 in public ports.
        group: see `Rival`.
    """

    def __init__(self, alpha: float = 1.0, beta: float = 0.5, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.alpha = check_number("alpha", alpha, low=0.0)
        self.beta = check_number("beta", beta, low=0.0)

    def loss(self, pairs: Pairs) -> Tensor:
        """HN-NCE, both directions averaged."""
        first, second = (self._directed(batch, pairs.s) for batch in directions(pairs))
        return (first + second).mean() / 2

    def _directed(self, batch: Directed, s: Tensor) -> Tensor:
        z, positive = s * batch.S, s * batch.positive
        weighted = z + _log_weights(z.detach(), batch, self.beta)
        gap = masked_lse(weighted, batch.negative) - positive
        return torch.logaddexp(gap, gap.new_tensor(self.alpha).log())


class HclLoss(Rival):
    """Contrastive learning with hard negatives (Robinson et al., arXiv 2010.04592).

    As in its public code, gradients flow through the weights.

    Args:
        beta: how much hard negatives weigh.
        tau: assumed share of false negatives.
        group: see `Rival`.
    """

    def __init__(self, beta: float = 1.0, tau: float = 0.1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.beta = check_number("beta", beta, low=0.0)
        self.tau = check_number("tau", tau, low=0.0, high=0.999)

    def loss(self, pairs: Pairs) -> Tensor:
        """HCL, both directions averaged."""
        first, second = (self._directed(batch, pairs.s) for batch in directions(pairs))
        return (first + second).mean() / 2

    def _directed(self, batch: Directed, s: Tensor) -> Tensor:
        z, positive = s * batch.S, s * batch.positive
        log_count = batch.num_negatives.clamp(min=1).to(z.dtype).log()
        total = masked_lse(z + _log_weights(z, batch, self.beta), batch.negative)
        if self.tau > 0:
            total = _log_difference(total, math.log(self.tau) + log_count + positive)
        log_N = torch.maximum(total - math.log1p(-self.tau), log_count - s)
        gap = log_N - positive
        return torch.logaddexp(gap, gap.new_zeros(())).where(batch.num_negatives > 0, 0.0)


def _log_difference(a: Tensor, b: Tensor) -> Tensor:
    """`log(e^a - e^b)`, and a very negative finite number where that is not above 0."""
    above = a > b
    # Where the difference is not taken it must not give a NaN either: its gradient would be 0 times that.
    ratio = (b - a).where(above, -1.0).exp()
    return (a + torch.log1p(-ratio)).where(above, lowest(a))


class DebiasedLoss(HclLoss):
    """Debiased contrastive learning (Chuang et al., arXiv 2007.00224): `HclLoss` with equal weights.

    Args:
        tau: assumed share of false negatives.
        group: see `Rival`.
    """

    def __init__(self, tau: float = 0.1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(0.0, tau, group)
