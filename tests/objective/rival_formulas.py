"""The rival losses a second time: float64, one query after another, exponentials instead of logarithms.

Each function sees one query: `S` its cosines to all candidates `[N]`, `i` the positive, `neg` the indices of the
negatives, and whatever else its formula mentions. The loss of a batch is the mean over the queries of both directions,
unless its function says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def hn_nce(S: Tensor, i: int, neg: Tensor, s: Tensor, alpha: float, beta: float) -> Tensor:
    z = s * S
    w = torch.exp(beta * z[neg]).detach()
    w = len(neg) * w / w.sum()
    return -torch.log(z[i].exp() / (alpha * z[i].exp() + (w * z[neg].exp()).sum()))


def hcl(S: Tensor, i: int, neg: Tensor, s: Tensor, beta: float, tau: float) -> Tensor:
    z = s * S
    count = len(neg)
    importance = torch.exp(beta * z[neg])
    reweighted = (importance * z[neg].exp()).sum() / importance.mean()
    Ng = (-tau * count * z[i].exp() + reweighted) / (1 - tau)
    Ng = torch.maximum(Ng, count * torch.exp(-s))
    return -torch.log(z[i].exp() / (z[i].exp() + Ng))


def debiased(S: Tensor, i: int, neg: Tensor, s: Tensor, tau: float) -> Tensor:
    z = s * S
    Ng = (z[neg].exp().sum() - tau * len(neg) * z[i].exp()) / (1 - tau)
    Ng = torch.maximum(Ng, len(neg) * torch.exp(-s))
    return -torch.log(z[i].exp() / (z[i].exp() + Ng))


def gist(S: Tensor, i: int, neg: Tensor, s: Tensor, guide: Tensor, margin: float, strategy: str) -> Tensor:
    limit = guide[i] - margin if strategy == "absolute" else guide[i] * (1 - margin)
    kept = [j for j in neg.tolist() if guide[j] <= limit]
    return F.cross_entropy(s * S[[i, *kept]], torch.tensor(0))


def softclip(S: Tensor, i: int, neg: Tensor, s: Tensor, G: Tensor, alpha: float, tau: float, relation: float) -> Tensor:
    everyone = torch.cat([torch.tensor([i]), neg])
    P = alpha * (G[everyone] / tau).softmax(0)
    P[0] += 1 - alpha
    first = (P * (P.log() - (s * S[everyone]).log_softmax(0))).sum()
    if len(neg) == 0:
        return first
    P = (G[neg] / tau).softmax(0)
    return first + relation * (P * (P.log() - (s * S[neg]).log_softmax(0))).sum()


def cwcl(S: Tensor, i: int, neg: Tensor, s: Tensor, G: Tensor) -> Tensor:
    everyone = torch.cat([torch.tensor([i]), neg])
    w = (1 + G[everyone]) / 2
    return -(w * (s * S[everyone]).log_softmax(0)).sum() / w.sum()


def vse(S: Tensor, i: int, neg: Tensor, margin: Tensor, hardest: bool) -> Tensor:
    """Summed over the queries of both directions."""
    hinges = [F.relu(margin[j] + S[j] - S[i]) for j in neg.tolist()]
    return max(hinges) if hardest else sum(hinges, S.new_zeros(()))


def arm(S: Tensor, i: int, neg: Tensor, D: Tensor) -> Tensor:
    """Summed over the queries of a direction and divided by all its negatives; then the mean of both directions."""
    return sum((((S[i] - S[j]) - (1 + D[j]) / 2) ** 2 for j in neg.tolist()), S.new_zeros(()))


def siglip(v: Tensor, t: Tensor, s: Tensor, b: Tensor, gamma: float, same: Tensor) -> Tensor:
    """Over a whole batch."""
    N = len(v)
    total = v.new_zeros(())
    for i in range(N):
        for j in range(N):
            if i == j:
                total = total - torch.log(torch.sigmoid(s * (v[i] @ t[j]) + b))
            elif not same[i, j]:
                total = total - torch.log(torch.sigmoid(-(s * (v[i] @ t[j] + gamma * (t[i] @ t[j]).detach()) + b)))
    return total / N


def both_directions(v: Tensor, t: Tensor, same: Tensor, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The losses of the queries of each direction; `loss(direction, S, i, neg)` with direction 0 for images."""
    losses = []
    for direction, (queries, candidates) in enumerate(((v, t), (t, v))):
        rows = []
        for i in range(len(v)):
            neg = torch.tensor([j for j in range(len(v)) if not same[i, j]], dtype=torch.int64)
            rows.append(loss(direction, candidates @ queries[i], i, neg))
        losses.append(torch.stack(rows))
    return losses[0], losses[1]
