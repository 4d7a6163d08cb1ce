"""Batches with the geometry of dense captions, and the loss written down a second time, from the formula.

`formula` shares nothing with `pipeline.objective`. Its loss of a pair is `log(1 + sum_negatives exp(z_ij - z_ii))`, in
float64, so that it is exact for the tiniest losses too, where a cross-entropy in float64 reads zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
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
    """Value and gradients of HN-CLIP's objective, from its definition, in one process."""
    t = batch.text.double()
    return margin_formula(batch, gamma * t @ t.T, [] if ids is None else [ids])


def margin_formula(
    batch: Batch, m: Tensor, keys: Sequence[Tensor] = (), smoothing: float = 0.0, decoupled: bool = False
) -> Outcome:
    """Value and gradients of InfoNCE with the margin m `[N, N]` on its negatives.

    Args:
        keys: a pair and another with an equal key of any kind are no negatives of each other.
        smoothing: of the labels, over whatever is not masked.
        decoupled: the positive is not in the denominator.
    """
    image, text, scale = leaves = Batch(*(tensor.double() for tensor in batch)).leaves()
    N = len(image)
    own = torch.eye(N, dtype=torch.bool)
    masked = sum((key[:, None] == key[None, :] for key in keys), own) & ~own
    z = scale * (image @ text.T + torch.where(own, 0.0, m))
    gaps = (z - z.diagonal()[:, None], z.T - z.diagonal()[:, None])

    def directed(gap: Tensor) -> Tensor:
        negatives = gap.masked_fill(masked | own, -torch.inf)
        padded = torch.cat([negatives, gap.new_full((N, 1), -1e9)], dim=1)  # a pair may have no negative at all
        lse = torch.logsumexp(padded, dim=1)
        loss = lse.where(lse > -1e8, 0.0) if decoupled else torch.nn.functional.softplus(lse, threshold=1e3)
        # -sum_j q_ij log p_ij = plain - sum_j (q_ij - [i = j]) (z_ij - z_ii), as the q_ij sum to 1
        q = smoothing * (~masked).double() / (~masked).sum(1, keepdim=True)
        return (loss - (q * gap).sum(1)).mean()

    loss = (directed(gaps[0]) + directed(gaps[1])) / 2
    return Outcome(loss.detach(), *torch.autograd.grad(loss, leaves))


def outcome(loss: Tensor, batch: Batch) -> Outcome:
    """Gradients of a loss with respect to the leaves it came from."""
    return Outcome(loss.detach().double(), *(grad.double() for grad in torch.autograd.grad(loss, tuple(batch))))


def relative_error(found: Outcome, expected: Outcome) -> float:
    """The largest, over loss and gradients, of `|found - expected| / |expected|` in the Euclidean norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def averaged(ranks: list[Outcome]) -> Outcome:
    """Gradients after the averaging that DDP and DeepSpeed do: rank r contributes to rows of its own only."""
    assert len({rank.loss.item() for rank in ranks}) == 1, "the value differs between ranks"
    image, text = (torch.cat([getattr(rank, name) for rank in ranks]) / len(ranks) for name in ("image", "text"))
    return Outcome(ranks[0].loss, image, text, torch.stack([rank.scale for rank in ranks]).mean(0))


def own_rows(num_pairs: int, group: dist.ProcessGroup | None = None) -> slice:
    """The pairs of this rank."""
    n = num_pairs // dist.get_world_size(group)
    return slice(dist.get_rank(group) * n, (dist.get_rank(group) + 1) * n)


def strips_of(rows: int, num_columns: int, itemsize: int) -> int:
    """The memory budget that makes strips of so many rows: a quarter is scratch, four strips share the rest."""
    return -(-rows * num_columns * max(itemsize, 4) * 16 // 3)
