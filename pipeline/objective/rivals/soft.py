"""Soft targets: negatives that resemble the anchor share its probability. SoftCLIP and CWCL."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from pipeline.objective.rivals.base import Pairs, Rival, check_choice, check_number, diagonal, directions, lowest

WEIGHTS = ("captions", "images", "frozen")


class SoftClipLoss(Rival):
    """SoftCLIP (arXiv 2303.17561): the cosines within a modality soften the targets across modalities.

        P_i = softmax_j(G_ij / tau),    Q_i = softmax_j(s S_ij)
        L_i = KL((1 - alpha) [i = j] + alpha P_i || Q_i) + relation KL(P_i without i || Q_i without i)

    G is the cosine of the images in the direction image to caption, and that of the captions in the other; no gradient
    flows through it. Both directions averaged. The defaults of the weights are ours.

    Args:
        alpha: share of the soft target.
        tau: its temperature.
        relation: weight of the term over the negatives alone, renormalised.
        group: see `Rival`.
    """

    def __init__(
        self, alpha: float = 0.3, tau: float = 0.1, relation: float = 1.0, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(group)
        self.alpha = check_number("alpha", alpha, low=0.0, high=1.0)
        self.tau = check_number("tau", tau, low=1e-3)
        self.relation = check_number("relation", relation, low=0.0)

    def loss(self, pairs: Pairs) -> Tensor:
        """SoftCLIP, both directions averaged."""
        total = pairs.S.new_zeros(())
        for batch, features in zip(directions(pairs), (pairs.v, pairs.t), strict=True):
            G = (features @ features.T).detach() / self.tau
            z = pairs.s * batch.S
            own = diagonal(batch.negative)
            kept = batch.negative | own
            P = self.alpha * _log_softmax(G, kept).exp() + (1 - self.alpha) * own.to(z.dtype)
            total = total + _kl(P, _log_softmax(z, kept), kept)
            P = _log_softmax(G, batch.negative).exp()
            total = total + self.relation * _kl(P, _log_softmax(z, batch.negative), batch.negative)
        return total / 2


def _log_softmax(z: Tensor, kept: Tensor) -> Tensor:
    """Over what is kept of each row."""
    return z.masked_fill(~kept, lowest(z)).log_softmax(1)


def _kl(P: Tensor, log_Q: Tensor, kept: Tensor) -> Tensor:
    """`KL(P || Q)` of the rows over what is kept; mean of the rows, a row without anything counting as 0."""
    return (P.xlogy(P) - P * log_Q).masked_fill(~kept, 0.0).sum(1).mean()


class CwclLoss(Rival):
    """Continuously weighted contrastive loss (arXiv 2309.14580).

        L_i = -sum_j w_ij log softmax_j(s S_ij) / sum_j w_ij,    w_ij = (1 + cos_ij) / 2,    j = i included

    The weights come from the cosines within one modality, and are constants to autograd. Both directions averaged.

    Args:
        weights: `captions` or `images` as they are now, or `frozen`, the `frozen_text_features`.
        group: see `Rival`.
    """

    def __init__(self, weights: str = "captions", group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.weights = check_choice("weights", weights, WEIGHTS)

    @property
    def needs(self) -> tuple[str, ...]:
        """The frozen captions, where the weights come from them."""
        return ("frozen_text_features",) if self.weights == "frozen" else ()

    def loss(self, pairs: Pairs) -> Tensor:
        """CWCL, both directions averaged."""
        features = pairs.v if self.weights == "images" else pairs.t if pairs.frozen_t is None else pairs.frozen_t
        features = features.detach()
        kept = pairs.negative | diagonal(pairs.negative)
        w = ((1 + features @ features.T) / 2).masked_fill(~kept, 0.0)
        total = pairs.S.new_zeros(())
        for batch in directions(pairs):
            log_Q = _log_softmax(pairs.s * batch.S, kept).masked_fill(~kept, 0.0)
            total = total - ((w * log_Q).sum(1) / w.sum(1)).mean()
        return total / 2
