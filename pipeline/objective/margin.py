"""Margins that are linear in the features: what is added to the cosine of a negative, as a few numbers.

    z_ij = s (v_i.t_j + m_ij)  (i != j),    m_ij = live t_i.t_j + frozen t0_i.t0_j + mean G + constant

`mean G` is the mean of t_i.t_j over all i != j of the global batch. No gradient flows through m. Such a margin takes no
matrix product of its own: `v_i.t_j + live t_i.t_j = (v_i + live t_i).t_j`, the frozen captions widen that product, and
a constant on all negatives is one on the positives, with the other sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Margin:
    """The factors of the formula above; all 0 is InfoNCE.

    Attributes:
        live: of the cosine of the captions, as the text encoder has them now.
        frozen: of the cosine of the captions as given, `t0`.
        mean: of the mean cosine of the captions.
        constant: on every negative.
        of_images: the image is in the place of the caption, and the caption in that of the image.
    """

    live: float = 0.0
    frozen: float = 0.0
    mean: float = 0.0
    constant: float = 0.0
    of_images: bool = False

    def left(self, v: Tensor, t: Tensor, t0: Tensor | None) -> Tensor:
        """What multiplies `right` for the logits over s, but for constants: `[n, K]`."""
        left = v if self.live == 0 else torch.add(v, t, alpha=self.live)
        return left if t0 is None else torch.cat([left, self.frozen * t0], 1)

    def right(self, t: Tensor, t0: Tensor | None) -> Tensor:
        """`[n, K]`, in the dtype of the features: t, widened by the frozen captions."""
        return t if t0 is None else torch.cat([t, t0.to(t.dtype)], 1)

    def offset(self, all_t: Tensor) -> Tensor:
        """The part of m that is the same for all negatives: `[]`.

        Args:
            all_t: `[N, D]`, the captions of the global batch.
        """
        offset = all_t.new_tensor(self.constant)
        return offset if self.mean == 0 else offset + self.mean * mean_cosine(all_t)


def mean_cosine(t: Tensor) -> Tensor:
    """Mean of `t_i.t_j` over all i != j, `[]`, from `|sum_i t_i|^2 = sum_ij t_i.t_j`; 0 for a single row."""
    N = t.shape[0]
    total = t.sum(0, dtype=torch.float64).square().sum() - t.double().square().sum()
    return (total / max(N * (N - 1), 1)).to(t.dtype)
