"""InfoNCE with a margin that is linear in the features: the module around the kernel, and its options."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch.distributed as dist
from torch import Tensor

from pipeline.objective.base import Objective, refuse_unless
from pipeline.objective.contrastive import DEFAULT_MEMORY_BUDGET, Settings, contrastive_loss
from pipeline.objective.exchange import Exchange
from pipeline.objective.inputs import Inputs, as_scale
from pipeline.objective.margin import Margin
from pipeline.objective.monitor import Monitor
from pipeline.objective.smoothing import smoothing_term


class MarginOptions(TypedDict, total=False):
    """What every objective of this family takes; see `MarginLoss`."""

    label_smoothing: float
    decoupled: bool
    equal_captions: bool
    group: dist.ProcessGroup | None
    memory_budget: int


class MarginLoss(Objective):
    """Symmetric cross-entropy over the global batch, with a margin on the negatives through which no gradient flows.

        z_ij = s (v_i.t_j + m_ij)  (i != j),    z_ii = s v_i.t_i,    L = 1/2 [CE(z, y) + CE(z^T, y)],    y_i = i

    Subclasses say what m is. No N x N matrix is built: memory grows linearly with the batch, apart from
    `memory_budget`.

    Args:
        label_smoothing: eps of the target `(1 - eps) [i = j] + eps / M` over the M pairs that are not masked; Long-CLIP
            trains with 0.1. Beyond a finite gap its gradient pulls positive and negatives together again.
        decoupled: leave the positive out of the softmax's denominator (arXiv 2110.06848), which then cannot saturate.
        equal_captions: pairs with equal `caption_keys` are no negatives of each other, as those with equal ids.
        group: the ranks that share the global batch; None for the default group where one is initialised.
        memory_budget: bytes for the logits that are in memory at once. More means fewer of them computed twice.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        decoupled: bool = False,
        equal_captions: bool = False,
        group: dist.ProcessGroup | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        super().__init__()
        refuse_unless(
            0 <= label_smoothing < 1, f"label_smoothing must be at least 0 and below 1, not {label_smoothing}"
        )
        for name, flag in (("decoupled", decoupled), ("equal_captions", equal_captions)):
            refuse_unless(isinstance(flag, bool), f"{name} must be true or false, not {flag!r}")
        refuse_unless(
            not (decoupled and label_smoothing),
            "label_smoothing and decoupled exclude each other: without the positive there is no distribution to smooth",
        )
        refuse_unless(memory_budget > 0, f"memory_budget is a number of bytes above 0, not {memory_budget}")
        self.label_smoothing = float(label_smoothing)
        self.decoupled = decoupled
        self.equal_captions = equal_captions
        self.group = group
        self.memory_budget = memory_budget
        self._monitor = Monitor()

    def margin(self) -> Margin:
        """The margin of the present step."""
        raise NotImplementedError

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the further keyword arguments that `forward` takes, and must be given."""
        return ("caption_keys",) if self.equal_captions else ()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
        output_dict: bool = False,
        *,
        caption_keys: Tensor | None = None,
        frozen_text_features: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The mean loss of the global batch; see `HNClipLoss` for inputs and errors."""
        frozen = None if frozen_text_features is None else frozen_text_features.detach()
        inputs = Inputs(image_features, text_features, as_scale(logit_scale), ids, caption_keys, frozen, self.needs)
        margin = self.margin()
        settings = Settings(margin, self.decoupled, self.memory_budget)
        loss = contrastive_loss(inputs, settings, self.group, self._monitor)
        if self.label_smoothing:
            loss = loss + self.label_smoothing * smoothing_term(inputs, margin, self.group)
        return {"contrastive_loss": loss} if output_dict else loss

    def saturation(self) -> dict[str, float | str]:
        """How saturated the last evaluation was, over the global batch. One collective: all ranks call it, or none.

        ===================== ==================================================================================
        `zero_rows`           share of the images whose loss plain cross-entropy in float32 reads as 0.0
        `zero_columns`        that of the captions
        `gap_q05`, `q50, q95` quantiles over the images of positive minus hardest negative, in units of cosine,
                              margin included
        `effective_negatives` exp of the entropy of the softmax over the negatives of an image; mean over the
                              first 256 images of every rank
        `max_feature_grad`    largest absolute gradient of the loss with respect to the features
        `feature_grad_norm`   its Euclidean norm, in float64: squares of small ones vanish in float32
        `dtype`               of the features / of the logits
        ===================== ==================================================================================
        """
        return self._monitor.figures(Exchange(self.group))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        options = ("label_smoothing", "decoupled", "equal_captions")
        return ", ".join(f"{name}={getattr(self, name)}" for name in options if getattr(self, name))


class InfoNCELoss(MarginLoss):
    """CLIP's own loss (arXiv 2103.00020): `m_ij = 0`. Options as in `MarginLoss`, inputs as in `HNClipLoss`."""

    def __init__(self, **options: Unpack[MarginOptions]) -> None:
        super().__init__(**options)

    def margin(self) -> Margin:
        """None."""
        return Margin()
