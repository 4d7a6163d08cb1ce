"""StructXLIP's contrastive terms, exact over the pairs of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.frameworks.base import mean_over_ranks
from pipeline.objective import InfoNCELoss
from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_summed

_NO_LOGIT = -1e9  # of what a softmax leaves out; minus infinity has no gradient
_FAR = 200.0  # a logit: exp of minus this is 0 in float32
_LEFT_OUT = -1  # ids of pairs are positive


def infonce_of(loss: InfoNCELoss, images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """InfoNCE over some of the pairs, as if the others were not there; 0 where there are none.

    Ranks may have any number of them. The other pairs go along, in two dimensions of their own: they are positives
    beyond doubt, whose loss is 0, and negatives of nobody, since they are far from the pairs that count and share one
    id among themselves.

    Args:
        loss: what the pairs that count have.
        images, texts: [B, D], normalised. scale: [1], above 0, a constant. ids: int64 [B], equal for equal pairs.
        rows: bool [B], which pairs count.
    """
    far = _FAR / scale
    here = rows[:, None].float()
    images = torch.cat([torch.where(rows[:, None], images.float(), 0.0), 2 * here - 1, (here - 1) * far], dim=1)
    texts = torch.cat([torch.where(rows[:, None], texts.float(), 0.0), (here - 1) * far, here], dim=1)
    mean = loss(images, texts, scale, ids=torch.where(rows, ids, _LEFT_OUT))
    share = mean_over_ranks(rows.float())
    return torch.where(share > 0, mean / share.clamp(min=1e-9), 0.0)


def span_features(head: Callable[[Tensor], Tensor], tokens: Tensor, spans: Tensor) -> Tensor:
    """Features of runs of tokens: the tower's head of their sum, weighted by the softmax of their lengths.

    Args:
        head: final norm and projection of the text tower.
        tokens: [B, L, W], of its last layer.
        spans: int64 [B, S, 2], first and one past the last token.

    Returns:
        [B, S, D], normalised; of no meaning where a span has no token.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    inside = (place >= spans[..., :1]) & (place < spans[..., 1:])
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    weights = wide.norm(dim=-1)[:, None].masked_fill(~inside, _NO_LOGIT).softmax(-1)
    return F.normalize(head((weights @ wide).to(tokens.dtype)), dim=-1)


def local_loss(spans: Tensor, crops: Tensor, has_span: Tensor, has_crop: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """-log of the share of a pair's own crops in the softmax of a span over the crops of all pairs; mean over spans.

    The logits are a tensor [B, S, W B K] on each of W ranks.

    Args:
        spans: [B, S, D], crops: [B, K, D], normalised. has_span: bool [B, S]. has_crop: bool [B, K].
        scale: of the cosines.
        ids: int64 [B]; crops of equal pairs are no negatives.
    """
    exchange = Exchange()
    spans, crops = spans.float(), crops.float()
    others = gather_summed(crops.flatten(0, 1), exchange, torch.float32)
    there = exchange.gather(has_crop.flatten().long()) > 0
    owner = exchange.gather(ids.repeat_interleave(crops.shape[1]))
    negative = there & (owner != ids[:, None])  # [B, W B K]
    own = (scale * spans @ crops.mT).masked_fill(~has_crop[:, None], _NO_LOGIT)
    other = (scale * spans @ others.T).masked_fill(~negative[:, None], _NO_LOGIT)
    losses = torch.cat([own, other], dim=-1).logsumexp(-1) - own.logsumexp(-1)
    return mean_over_ranks(losses.flatten(), (has_span & has_crop.any(1, keepdim=True)).flatten())
