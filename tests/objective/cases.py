"""Batches with the geometry of dense captions, and the loss written down a second time, from the formula.

`formula` shares nothing with `pipeline.objective`. Its loss of a pair is `log(1 + sum_negatives exp(z_ij - z_ii))`, in
float64, so that it is exact for the tiniest losses too, where a cross-entropy in float64 reads zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class Batch(NamedTuple):
    """Normalised features `[N, D]` of N pairs, and the scale `[1]`."""

    image: Tensor
    text: Tensor
    scale: Tensor

    def leaves(self) -> Batch:
        """The same numbers, as leaves that ask for gradients."""
        return Batch(*(tensor.detach().clone().requires_grad_() for tensor in self))

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the pairs."""
        return Batch(self.image[start:stop], self.text[start:stop], self.scale)


class Outcome(NamedTuple):
    """Loss and gradients, in float64."""

    loss: Tensor
    image: Tensor
    text: Tensor
    scale: Tensor


def dense_captions(num_pairs: int, dim: int = 32, scale: float = 100.0, dtype: torch.dtype = torch.float64) -> Batch:
    """Pairs whose captions have a mean cosine of about 0.8, as those of DCI do.

    Some pairs are learned well, others hardly, so that losses of every size occur at a scale of 100.
    """
    generator = torch.Generator().manual_seed(num_pairs)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / dim**0.5

    topic, detail = normalize(noise(dim), dim=0), noise(num_pairs, dim)
    text = normalize(topic + 0.5 * detail, dim=1)
    blur = torch.linspace(0, 2, num_pairs, dtype=torch.float64)[:, None]
    image = normalize(detail + blur * noise(num_pairs, dim), dim=1)
    return Batch(image.to(dtype), text.to(dtype), torch.tensor([scale], dtype=dtype))


def formula(batch: Batch, gamma: float, ids: Tensor | None = None) -> Outcome:
    """Value and gradients of the objective, from its definition, in one process."""
    image, text, scale = leaves = Batch(*(tensor.double() for tensor in batch)).leaves()
    N = len(image)
    z = scale * (image @ text.T + gamma * (text @ text.T).detach())
    positive = scale * (image * text).sum(1)
    no_negative = torch.eye(N, dtype=torch.bool) if ids is None else ids[:, None] == ids[None, :]
    z = z.masked_fill(no_negative, -torch.inf)

    def directed(gaps: Tensor) -> Tensor:
        padded = torch.cat([gaps, gaps.new_full((N, 1), -1e9)], dim=1)  # a pair may have no negative at all
        return torch.nn.functional.softplus(torch.logsumexp(padded, dim=1), threshold=1e3).mean()

    loss = (directed(z - positive[:, None]) + directed(z.T - positive[:, None])) / 2
    return Outcome(loss.detach(), *torch.autograd.grad(loss, leaves))


def outcome(loss: Tensor, batch: Batch) -> Outcome:
    """Gradients of a loss with respect to the leaves it came from."""
    return Outcome(loss.detach().double(), *(grad.double() for grad in torch.autograd.grad(loss, tuple(batch))))


def relative_error(found: Outcome, expected: Outcome) -> float:
    """The largest, over loss and gradients, of `|found - expected| / |expected|` in the Euclidean norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
