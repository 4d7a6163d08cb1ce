"""GradCache: the gradient of a loss over many micro-batches, in the memory of one.

Gao et al., arXiv 2101.06983. With f_k the features of micro-batch k and L a loss over all of them,

    dL/dw = sum_k (df_k/dw)^T dL/df_k = sum_k d/dw <f_k, c_k>,    c_k = dL/df_k, a constant

So: encode every micro-batch without a graph, take the gradient of the loss with respect to the features, then encode
each micro-batch again, with the same random numbers, and back-propagate its surrogate <f_k, c_k>. The micro-batches are
DeepSpeed's own accumulation, one backward and one step call each: several backward calls between two step calls are
silently wrong under ZeRO.

The temperature belongs to no micro-batch: its gradient is dealt out to them in equal parts, so that it counts once and
every parameter takes part in every backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.model import Features

_NO_GRADIENT = "text_mask"
_SHARED = "logit_scale"
_OWN = "further"  # of a framework, whose terms are over one micro-batch


class FeatureCache:
    """The features of all micro-batches of a step, as leaves that a loss can be differentiated by.

    Args:
        parts: features per micro-batch, computed without a graph. Captions of fewer tokens are padded, and masked.

    Attributes:
        whole: the features of all pairs, in the order of the micro-batches.
    """

    def __init__(self, parts: Sequence[Features]) -> None:
        self._parts = parts
        fields: dict[str, Any] = {
            name: self._join(name) for name in Features._fields if name != _OWN and getattr(parts[0], name) is not None
        }
        self.whole = Features(**fields)
        self._gradients: dict[str, Tensor] = {}

    def differentiate(self, loss: Tensor) -> None:
        """Keep the gradient of a loss over `whole`."""
        leaves = {n: t for n, t in self.whole._asdict().items() if t is not None and t.requires_grad}
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        self._gradients = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}

    def surrogate(self, number: int, features: Features) -> Tensor:
        """<features, gradient> of a micro-batch, in fp32: its gradient is that micro-batch's share of the loss's."""
        start = sum(part.image_features.shape[0] for part in self._parts[:number] if part.image_features is not None)
        total = features.logit_scale.new_zeros((), dtype=torch.float32)
        for name, gradient in self._gradients.items():
            own: Tensor = getattr(features, name)
            if name == _SHARED:
                share = gradient / len(self._parts)
            else:
                share = gradient[start : start + own.shape[0]]
                share = share[:, : own.shape[1]]  # of a caption that was padded
            total = total + (own.float() * share.float()).sum()
        return total

    def _join(self, name: str) -> Tensor:
        tensors: list[Tensor] = [getattr(part, name) for part in self._parts]
        if name == _SHARED:
            return tensors[0].detach().requires_grad_()
        if name in ("text_tokens", "text_mask"):
            length = max(t.shape[1] for t in tensors)
            tensors = [F.pad(t, (0, 0) * (t.ndim - 2) + (0, length - t.shape[1])) for t in tensors]
        joined = torch.cat(tensors).detach()
        # fp16 would flush the gradients of features to zero: no loss scale reaches them here.
        joined = joined.float() if joined.dtype == torch.float16 else joined
        return joined if name == _NO_GRADIENT else joined.requires_grad_()


def cached_step(
    num_micro_batches: int,
    encode: Callable[[int], Features],
    whole_loss: Callable[[Features], Tensor],
    micro_loss: Callable[[int, Features], Tensor | None],
    backward: Callable[[Tensor], None],
) -> None:
    """One optimizer step, whose gradient is that of `whole_loss` over all micro-batches plus the mean `micro_loss`.

    Args:
        num_micro_batches: K.
        encode: features of a micro-batch; must give the same for the same number, dropout included.
        whole_loss: of the features of all pairs of this rank.
        micro_loss: a further loss of one micro-batch, or None.
        backward: back-propagates a part of the loss of the step and lets the engine count a micro-batch; the parts
            are summed, not averaged.
    """
    with torch.no_grad():
        cache = FeatureCache([encode(number) for number in range(num_micro_batches)])
    cache.differentiate(whole_loss(cache.whole))
    for number in range(num_micro_batches):
        features = encode(number)
        part = cache.surrogate(number, features)
        further = micro_loss(number, features)
        backward(part if further is None else part + further / num_micro_batches)
