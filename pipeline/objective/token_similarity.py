"""Late interaction of all images with all captions, without the n P x N L matrix of token similarities in memory.

    i2t_ij = 1/P sum_p max_w x_ip.y_jw,    t2i_ij = sum_w a_jw max_p x_ip.y_jw

The maxima need one matrix product, done in tiles; of each tile only the maxima and where they are survive: N (P + L)
numbers per image. A maximum passes its gradient to where it was found, so the gradient needs no similarity again: with
G and H the gradients of i2t and t2i, it is that of the sum of G_ij/P x_ip.y_jw over the found (p, w) of i2t, plus H_ij
a_jw x_ip.y_jw over those of t2i. That is a product with a sparse matrix, P + L entries per pair instead of P L.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_BYTES_PER_ENTRY = 80  # of the sparse matrix: two int64 indices and a value, and what sorting them takes


def token_similarities(x: Tensor, y: Tensor, weights: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Both similarities of n images and N captions, `[n, N]` each, exactly differentiable by x and y.

    Args:
        x: patches `[n, P, D]`.
        y: words `[N, L, D]`. All count in the maximum over words: where there is none, repeat another of the caption.
        weights: a, `[N, L]`, of the words in t2i; zero where there is none.
        budget: bytes of a tile.
    """
    both: tuple[Tensor, Tensor] = _TokenSimilarities.apply(x, y, weights, budget)
    return both


class _Maxima(NamedTuple):
    """i2t, t2i `[n, N]`; the words found by patches `[n, P, N]` and the patches found by words `[n, N, L]`."""

    i2t: Tensor
    t2i: Tensor
    words: Tensor | None
    patches: Tensor | None


class _TokenSimilarities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weights: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        found = _maxima(x, y, weights, budget, keep=any(ctx.needs_input_grad[:2]))
        ctx.budget = budget
        ctx.save_for_backward(x, y, weights, found.words, found.patches)
        return found.i2t, found.t2i

    @staticmethod
    def backward(ctx: Any, G: Tensor, H: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weights, words, patches = ctx.saved_tensors
        (n, P, D), (N, L, _) = x.shape, y.shape
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dy = torch.zeros_like(y) if ctx.needs_input_grad[1] else None
        step = max(1, ctx.budget // (_BYTES_PER_ENTRY * N * (P + L)))
        for start in range(0, n, step):
            own = slice(start, start + step)
            A = _coefficients(words[own], patches[own], G[own] / P, H[own, :, None] * weights)
            if dx is not None:
                dx[own] = torch.sparse.mm(A, y.flatten(0, 1)).view(-1, P, D)
            if dy is not None:
                dy += torch.sparse.mm(A.t(), x[own].flatten(0, 1)).view(N, L, D)
        return dx, dy, None, None


def _maxima(x: Tensor, y: Tensor, weights: Tensor, budget: int, keep: bool) -> _Maxima:
    (n, P), (N, L) = x.shape[:2], y.shape[:2]
    index = torch.int16 if max(P, L) < 2**15 else torch.int32
    words = torch.empty(n, P, N, dtype=index, device=x.device) if keep else None
    patches = torch.empty(n, N, L, dtype=index, device=x.device) if keep else None
    i2t, t2i = x.new_empty(n, N), x.new_empty(n, N)
    pairs = max(1, budget // (P * L * x.element_size()))
    captions = min(N, pairs)
    images = max(1, pairs // captions)
    room = x.new_empty(min(images, n) * P * captions * L)  # one allocation for all tiles
    for row in range(0, n, images):
        i = slice(row, row + images)
        for column in range(0, N, captions):
            j = slice(column, column + captions)
            left, right = x[i].flatten(0, 1), y[j].flatten(0, 1)
            out = room[: len(left) * len(right)].view(len(left), len(right))
            tile = torch.mm(left, right.T, out=out).view(-1, P, len(y[j]), L)
            best_word, best_patch = tile.max(dim=3), tile.max(dim=1)
            i2t[i, j] = best_word.values.mean(1)
            t2i[i, j] = (best_patch.values * weights[j]).sum(2)
            if words is not None and patches is not None:
                words[i, :, j] = best_word.indices.to(index)
                patches[i, j] = best_patch.indices.to(index)
    return _Maxima(i2t, t2i, words, patches)


def _coefficients(words: Tensor, patches: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """The sparse matrix A `[m P, N L]` such that sum_ij g i2t-maxima + h t2i-maxima = <A, x y^T>.

    Args:
        words, patches: where the maxima are, `[m, P, N]` and `[m, N, L]`.
        g: `[m, N]`, of each maximum of i2t.
        h: `[m, N, L]`, of each maximum of t2i.
    """
    m, P, N = words.shape
    L = patches.shape[2]
    device = words.device
    image, caption = torch.arange(m, device=device), torch.arange(N, device=device)
    patch, word = torch.arange(P, device=device), torch.arange(L, device=device)
    rows = (image[:, None, None] * P + patch[:, None]).expand(m, P, N), image[:, None, None] * P + patches
    columns = caption * L + words, (caption[:, None] * L + word).expand(m, N, L)
    values = g[:, None, :].expand(m, P, N), h
    place = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in (rows, columns)])
    entries = torch.cat([part.flatten() for part in values])
    return torch.sparse_coo_tensor(place, entries, (m * P, N * L), check_invariants=False)
