"""FILIP's loss pair by pair, from its formula, in float64; shares nothing with `pipeline.objective`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Tokens(NamedTuple):
    """Patches [N, P, D], tokens [N, L, D], words [N, L], scale [1]."""

    image: Tensor
    text: Tensor
    mask: Tensor
    scale: Tensor

    def leaves(self) -> Tokens:
        """The same, to be differentiated."""
        image, text, scale = (t.detach().clone().requires_grad_() for t in (self.image, self.text, self.scale))
        return Tokens(image, text, self.mask, scale)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of a loss by image, text and scale, in float64."""
        return [g.double() for g in torch.autograd.grad(loss, [self.image, self.text, self.scale])]


def make_tokens(N: int, P: int, L: int, D: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tokens:
    """Random tokens: each caption starts with a token that is no word, and ends with some."""
    generator = torch.Generator().manual_seed(seed)
    image, text = (F.normalize(torch.randn(N, k, D, generator=generator), dim=-1).to(dtype) for k in (P, L))
    length = torch.randint(2, L, (N, 1), generator=generator)
    position = torch.arange(L)
    return Tokens(image, text, (position > 0) & (position < length), torch.tensor([20.0], dtype=dtype))


def plain_token_loss(tokens: Tokens, ids: Tensor | None = None) -> Tensor:
    """A loop over pairs; captions without words are as similar as 0 to every image."""
    image, text, scale = tokens.image.double(), tokens.text.double(), tokens.scale.double()
    N = len(image)
    i2t, t2i = [], []
    for i in range(N):
        for j in range(N):
            words = text[j][tokens.mask[j]]
            if len(words) == 0:
                i2t.append(image.new_zeros(()))
                t2i.append(image.new_zeros(()))
                continue
            cosine = image[i] @ words.T
            i2t.append(cosine.max(dim=1).values.mean())
            t2i.append(cosine.max(dim=0).values.mean())
    z, w = scale * torch.stack(i2t).view(N, N), scale * torch.stack(t2i).view(N, N).T
    if ids is not None:
        equal = (ids[:, None] == ids) & ~torch.eye(N, dtype=torch.bool)
        z, w = z.masked_fill(equal, -torch.inf), w.masked_fill(equal, -torch.inf)
    y = torch.arange(N)
    return (F.cross_entropy(z, y) + F.cross_entropy(w, y)) / 2
