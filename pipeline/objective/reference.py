"""The objective as the paper writes it: every matrix in memory, float64, one process. For tests and for reading."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def reference_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    gamma: float = 0.5,
    ids: Tensor | None = None,
) -> Tensor:
    """`L_HN` of arXiv 2608.18521 over the given batch, differentiable by autograd.

    Args:
        image_features: `[N, D]`, normalised.
        text_features: `[N, D]`, normalised.
        logit_scale: inverse temperature.
        gamma: strength of the margin.
        ids: `[N]`; negatives with equal id are left out.
    """
    v, t = image_features.double(), text_features.double()
    N = v.shape[0]
    diagonal = torch.eye(N, dtype=torch.bool, device=v.device)
    S = v @ t.T
    Gbar = (t @ t.T).detach().masked_fill(diagonal, 0.0)
    z = logit_scale * (S + gamma * Gbar)
    if ids is not None:
        z = z.masked_fill((ids[:, None] == ids) & ~diagonal, -torch.inf)
    y = torch.arange(N, device=v.device)
    return (F.cross_entropy(z, y) + F.cross_entropy(z.T, y)) / 2
