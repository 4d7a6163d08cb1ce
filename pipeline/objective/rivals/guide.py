"""False negatives left out by a guide: GIST (arXiv 2402.16829; sentence-transformers' GISTEmbedLoss)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from pipeline.objective.rivals.base import (
    Pairs,
    Rival,
    check_choice,
    check_number,
    cross_entropy,
    directions,
)

GUIDES = ("captions", "pairs", "frozen")
STRATEGIES = ("absolute", "relative")


class GistLoss(Rival):
    """InfoNCE over the negatives that a guide finds less similar than the positive.

        j is left out of row i  if  guide_ij > guide_ii - margin         (absolute)
                                or  guide_ij > guide_ii (1 - margin)     (relative)

    Where HN-CLIP pushes similar captions hardest, this spares them. Both directions averaged.

    Args:
        guide: `captions`, the live cosine of the captions, whose own is 1; `pairs`, the live cosine of image and
            caption, as in positive-aware mining; `frozen`, the cosine of `frozen_text_features`.
        margin: how far below the positive a negative must be.
        strategy: `absolute` or `relative`; alike where `guide_ii` is 1.
        group: see `Rival`.
    """

    def __init__(
        self,
        guide: str = "captions",
        margin: float = 0.05,
        strategy: str = "absolute",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group)
        self.guide = check_choice("guide", guide, GUIDES)
        self.margin = check_number("margin", margin, low=0.0)
        self.strategy = check_choice("strategy", strategy, STRATEGIES)

    @property
    def needs(self) -> tuple[str, ...]:
        """The frozen captions, where they are the guide."""
        return ("frozen_text_features",) if self.guide == "frozen" else ()

    def loss(self, pairs: Pairs) -> Tensor:
        """InfoNCE without the negatives that are too similar."""
        first, second = directions(pairs)
        guide = self._guide(pairs)
        rows = cross_entropy(pairs.s * first.S, pairs.s * first.positive, first.negative & self._kept(guide))
        columns = cross_entropy(pairs.s * second.S, pairs.s * second.positive, second.negative & self._kept(guide.T))
        return (rows + columns).mean() / 2

    def _guide(self, pairs: Pairs) -> Tensor:
        if self.guide == "pairs":
            return pairs.S.detach()
        captions = pairs.t.detach() if pairs.frozen_t is None else pairs.frozen_t
        return captions @ captions.T

    def _kept(self, guide: Tensor) -> Tensor:
        own = guide.diagonal()
        limit = own - self.margin if self.strategy == "absolute" else own * (1 - self.margin)
        return guide <= limit[:, None]
