"""Label smoothing for logits that are linear in the features: without an N x N matrix.

Cross-entropy with the target `(1 - eps) [i = j] + eps / M_i` on the M_i pairs that are not masked, i itself among
them, is the plain one plus

    eps L_s,    L_s = -1/2N sum_i 1/M_i sum_{j in Neg(i)} [(z_ij - z_ii) + (z_ji - z_ii)]

which is linear in the logits, so the sums over j go into the features: `sum_j v_i.t_j = v_i.(sum_j t_j)`. Long-CLIP
trains with eps = 0.1 (arXiv 2403.15378). Every rank computes the term of the whole batch, from two more gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_rows
from pipeline.objective.inputs import Inputs
from pipeline.objective.margin import Margin


def smoothing_term(inputs: Inputs, margin: Margin, group: dist.ProcessGroup | None = None) -> Tensor:
    """`L_s` over the global batch, the same on every rank; differentiable. The ranks have agreed on the inputs."""
    exchange = Exchange(group)
    with torch.autocast(inputs.image.device.type, enabled=False):
        exact = torch.float64 if inputs.image.dtype == torch.float64 else torch.float32
        v, t = (gather_rows(features, exchange).to(exact) for features in inputs[:2])
        if margin.of_images:
            v, t = t, v
        sum_negatives = _sums_of_negatives([exchange.gather(keys) for keys in inputs.keys], v.shape[0])
        num_negatives = sum_negatives(v.new_ones(v.shape[0], 1))[:, 0]
        fixed = t.detach()
        m = margin.live * (fixed * sum_negatives(fixed)).sum(1) + margin.offset(fixed) * num_negatives
        if margin.frozen and inputs.frozen_text_features is not None:
            t0 = exchange.gather(inputs.frozen_text_features.to(inputs.text.dtype)).to(exact)
            m = m + margin.frozen * (t0 * sum_negatives(t0)).sum(1)
        both_ways = (v * sum_negatives(t) + t * sum_negatives(v)).sum(1) + 2 * m
        excess = both_ways - 2 * num_negatives * (v * t).sum(1)
        s = inputs.scale.reshape(()).to(v.device, exact)
        return -s * (excess / (num_negatives + 1)).mean() / 2


def _sums_of_negatives(keys: Sequence[Tensor], num_pairs: int) -> Callable[[Tensor], Tensor]:
    """A function from rows `[N, D]` to the sum, for every pair, of the rows of its negatives `[N, D]`.

    Those are all rows but the pair's own and those that share its first key or its second: the sums over the sharers
    of each are left out, and what both leave out is put back.
    """
    if not keys:
        return lambda rows: rows.sum(0) - rows
    classes = [(1, _classes(key[:, None])) for key in keys]
    if len(keys) == 2:
        classes.append((-1, _classes(torch.stack(list(keys), 1))))

    def sums(rows: Tensor) -> Tensor:
        left_out = torch.zeros_like(rows)
        for sign, index in classes:
            left_out = left_out + sign * rows.new_zeros(num_pairs, rows.shape[1]).index_add(0, index, rows)[index]
        return rows.sum(0) - left_out

    return sums


def _classes(keys: Tensor) -> Tensor:
    """Numbers `[N]` that are equal where the rows of the keys `[N, k]` are."""
    index: Tensor = keys.unique(dim=0, return_inverse=True)[1]
    return index
