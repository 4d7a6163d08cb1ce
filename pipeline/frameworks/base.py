"""What a framework is: further views of a pair, a forward pass over them, and terms of the loss."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.data.views import Views
from pipeline.model import DualEncoder, Features
from pipeline.objective.exchange import Exchange
from pipeline.preprocess import Preprocess
from pipeline.sections import Section


class Framework(nn.Module):
    """One framework. Its parameters train beside the encoders, are saved with a run to go on from, and end with it.

    Args:
        config: its options.
        model: the encoders that it is put on, built and still on the CPU.

    Raises:
        ValueError: these encoders cannot serve it; says why and what to do.
    """

    Config: ClassVar[type[Section]]

    def __init__(self, config: Any, model: DualEncoder) -> None:
        super().__init__()
        self.config = config

    def views(self, preprocess: Preprocess) -> Views | None:
        """What it reads of a pair beside picture and caption; None is nothing."""
        return None

    def forward(
        self, model: DualEncoder, pixel_values: Tensor, input_ids: Tensor, extras: dict[str, Tensor], tokens: bool
    ) -> Features:
        """Encode a batch and its views, inside the engine's forward.

        Args:
            model: the encoders. `encode` is their plain forward pass.
            pixel_values: [B, 3, H, W]. input_ids: [B, L].
            extras: what `Views.collate` gave.
            tokens: whether L_tok wants features per patch and word.

        Returns:
            Features of the pairs, with what the own terms need in `further`.
        """
        raise NotImplementedError

    def terms(self, features: Features, ids: Tensor) -> dict[str, Tensor]:
        """Its own terms over one micro-batch of all ranks, by name, not weighted: the same values on every rank.

        Args:
            features: as `forward` gave them.
            ids: int64 [B], equal for equal samples.
        """
        raise NotImplementedError

    def weights(self) -> dict[str, float]:
        """The weight of every term at this point of the training."""
        raise NotImplementedError

    def describe(self) -> str:
        """Its parameters, counted and named: they train, and end with the training."""
        counts = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.named_parameters()}
        if not counts:
            return "no parameters beside the encoders'"
        return f"{sum(counts.values()):,} parameters that only training has: {', '.join(counts)}"

    def set_progress(self, progress: float) -> None:
        """Called before every optimizer step.

        Args:
            progress: steps done, as a share of the run in [0, 1].
        """


def mean_over_ranks(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of the values of all ranks, or of those that the mask leaves; 0 where it leaves none anywhere.

    The same value on every rank. The gradient is that of the whole mean once the engine has averaged it over the ranks,
    however many values each of them has.

    Args:
        values: [n], of this rank.
        mask: bool [n].
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    exchange = Exchange()
    own = torch.where(mask, values, 0.0).float().sum()
    total, count = exchange.total(torch.stack([own.detach(), mask.sum().float()]))
    # The value of all ranks, the gradient of this rank's share.
    share = own * exchange.size / count.clamp(min=1)
    return share + (total / count.clamp(min=1) - share).detach()
