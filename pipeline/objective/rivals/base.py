"""What the rivals share: the global batch on every rank, and its matrices.

Every rank gathers all features and computes the whole loss, so memory and time grow with the square of the global
batch on every rank. That is their price for being short; the margins of `hn_clip.py` do not pay it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.base import Objective, refuse_unless
from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_rows
from pipeline.objective.inputs import Inputs, agree, as_scale


class Pairs(NamedTuple):
    """The global batch, in float32 at least.

    Attributes:
        v: `[N, D]`, normalised images.
        t: `[N, D]`, normalised captions.
        s: `[]`, inverse temperature.
        S: `[N, N]`, cosines; rows are images, columns captions.
        negative: `[N, N]`, which pairs are negatives: not those on the diagonal, nor those with equal ids.
        frozen_t: `[N, K]`, the captions by the initial text encoder, where the objective needs them.
    """

    v: Tensor
    t: Tensor
    s: Tensor
    S: Tensor
    negative: Tensor
    frozen_t: Tensor | None


class Directed(NamedTuple):
    """The batch as a query (a row) sees it: once for images looking for captions, once for captions.

    Attributes:
        S: `[N, N]`, cosines.
        positive: `[N]`, their diagonal.
        negative: `[N, N]`, which columns are negatives of a row; symmetric.
        num_negatives: `[N]`.
    """

    S: Tensor
    positive: Tensor
    negative: Tensor
    num_negatives: Tensor


class Rival(Objective):
    """An objective that subclasses write as a function of the matrices of the global batch.

    Inputs are those of `HNClipLoss`: normalised features `[n, D]` of each rank, the exponentiated scale, optional ids.

    Args:
        group: the ranks that share the global batch; None for the default group where one is initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def loss(self, pairs: Pairs) -> Tensor:
        """The loss of the global batch, `[]`."""
        raise NotImplementedError

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
        output_dict: bool = False,
        *,
        frozen_text_features: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch, the same on every rank.

        Raises:
            ValueError: on every rank, if the inputs of any rank cannot be used.
        """
        inputs = Inputs(
            image_features,
            text_features,
            as_scale(logit_scale),
            ids,
            frozen_text_features=frozen_text_features,
            needs=self.needs,
        )
        loss = self._of_global_batch(inputs, self.loss)
        return {"contrastive_loss": loss} if output_dict else loss

    def _of_global_batch(self, inputs: Inputs, loss_of: Callable[[Pairs], Tensor]) -> Tensor:
        exchange = Exchange(self.group)
        agree(exchange, inputs)
        with torch.autocast(inputs.image.device.type, enabled=False):
            loss = loss_of(_gather_pairs(inputs, exchange))
            # A temperature that the loss does not use still gets a gradient: DDP waits for one of every parameter.
            return loss + 0.0 * inputs.scale.to(loss.device).reshape(())


def _gather_pairs(inputs: Inputs, exchange: Exchange) -> Pairs:
    exact = torch.float64 if inputs.image.dtype == torch.float64 else torch.float32
    v, t = (gather_rows(features, exchange).to(exact) for features in inputs[:2])
    negative = v.new_ones(v.shape[0], v.shape[0], dtype=torch.bool).fill_diagonal_(False)
    if inputs.ids is not None:
        ids = exchange.gather(inputs.ids)
        negative &= ids[:, None] != ids
    frozen = inputs.frozen_text_features
    frozen_t = None if frozen is None else exchange.gather(frozen.detach()).to(exact)
    return Pairs(v, t, inputs.scale.reshape(()).to(v.device, exact), v @ t.T, negative, frozen_t)


def directions(pairs: Pairs) -> tuple[Directed, Directed]:
    """Image to caption, and caption to image."""
    positive, num_negatives = pairs.S.diagonal(), pairs.negative.sum(1)
    first, second = (Directed(S, positive, pairs.negative, num_negatives) for S in (pairs.S, pairs.S.T))
    return first, second


def diagonal(like: Tensor) -> Tensor:
    """Which entries of an `[N, N]` are the positives."""
    return torch.zeros_like(like).fill_diagonal_(True)


def cross_entropy(z: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """`log(1 + sum over negatives of exp(z_ij - positive_i))`, `[N]`; 0 for a row without any."""
    gap = masked_lse(z, negative) - positive
    return torch.logaddexp(gap, gap.new_zeros(()))


def masked_lse(z: Tensor, kept: Tensor) -> Tensor:
    """Log-sum-exp of a row over what is kept; a very negative finite number where nothing is."""
    return torch.logsumexp(z.masked_fill(~kept, lowest(z)), 1)


def lowest(z: Tensor) -> float:
    """In place of `-inf`, which gives NaN gradients: its exponential is 0 beside any logit."""
    return torch.finfo(z.dtype).min / 4


def check_number(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """The value as a float, if it is within the bounds, both included.

    Raises:
        ValueError: it is not, or not finite.
    """
    refuse_unless(math.isfinite(value), f"{name} must be a finite number, not {value}")
    refuse_unless(low <= value <= high, f"{name} must be between {low:g} and {high:g}, not {value}")
    return float(value)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, if it is one of the choices.

    Raises:
        ValueError: it is not.
    """
    refuse_unless(value in choices, f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value
