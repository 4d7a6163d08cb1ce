"""The relatives of HN-CLIP's margin that are linear in the features too, and so come from the same kernel.

They tell what it is about the adaptive margin that helps: most of it is a constant, as captions of dense data sets have
a mean cosine of 0.84. Parameters that are not explained here are those of `HNClipLoss`, and so are the inputs.
"""

from __future__ import annotations

import math
from typing import Unpack

from pipeline.objective.base import refuse_unless
from pipeline.objective.hn_clip import HNClipLoss
from pipeline.objective.margin import Margin
from pipeline.objective.margin_loss import MarginOptions


class FrozenHNClipLoss(HNClipLoss):
    """`m_ij = gamma t0_i.t0_j`: the margin of the captions as the initial text encoder had them (arXiv 2608.18521, 3c).

    The caller encodes every caption once, before training, and brings `frozen_text_features` `[n, D]`, normalised, row
    i the caption of image i. They travel between the ranks with the live ones, in the dtype of those.
    """

    def margin(self) -> Margin:
        """`gamma G_ij` of the frozen captions."""
        return Margin(frozen=self.gamma)

    @property
    def needs(self) -> tuple[str, ...]:
        """The frozen features, and those of the options."""
        return ("frozen_text_features", *super().needs)


class CentredHNClipLoss(HNClipLoss):
    """`m_ij = gamma (G_ij - mean G)`: what is adaptive in the margin, without what is constant.

    `mean G` is the mean of `t_i.t_j` over all i != j of the global batch, from `|sum_i t_i|^2`.
    """

    def margin(self) -> Margin:
        """`gamma (G_ij - mean G)`."""
        return Margin(live=self.gamma, mean=-self.gamma)


class UniformMarginLoss(HNClipLoss):
    """`m_ij = m` for all negatives, as in CosFace (arXiv 1801.09414), or `gamma mean G`: what is constant in HN-CLIP's.

    Args:
        m: the margin, in units of cosine; None for `gamma mean G`, recomputed in every batch.
        gamma: strength of the mean; 0.5 when neither is given.
        gamma_schedule: of gamma.
        gamma_start: of gamma.
        **options: as in `MarginLoss`.
    """

    def __init__(
        self,
        m: float | None = None,
        gamma: float | None = None,
        gamma_schedule: str | None = None,
        gamma_start: float | None = None,
        **options: Unpack[MarginOptions],
    ) -> None:
        follows_mean = gamma is not None or gamma_schedule is not None or gamma_start is not None
        refuse_unless(m is None or not follows_mean, "m is a margin of its own: give m, or gamma and its schedule")
        refuse_unless(m is None or math.isfinite(m), f"m must be a finite number, not {m}")
        super().__init__(0.5 if gamma is None else gamma, gamma_schedule, gamma_start, **options)
        self.m = m

    def margin(self) -> Margin:
        """`m`, or `gamma mean G`."""
        return Margin(mean=self.gamma) if self.m is None else Margin(constant=self.m)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return super().extra_repr() if self.m is None else f"m={self.m}"


class ImageHNClipLoss(HNClipLoss):
    """`m_ij = gamma v_i.v_j`: the margin grows with the similarity of the images instead."""

    def margin(self) -> Margin:
        """`gamma G_ij` of the live images."""
        return Margin(live=self.gamma, of_images=True)
