"""FineLIP (CVPR 2025, arXiv 2504.01916): patches and words are each condensed to a few tokens, which meet one by one.

    L = L_objective(v, t) + weight L_hinge
    x_i = [condensed patches of image i, v_i],  y_j = [condensed words of caption j, t_j],  each of length 1
    A(z) = softmax over tokens (W2 GELU(W1 LayerNorm(z)))^T z          ATRM: K of the tokens z, one net for each side
    S_ij = mean over x in x_i of max over y in y_j of f(x.y)           CLIM; f is a leaky ReLU of slope 0.1
         + mean over y in y_j of max over x in x_i of f(x.y)
    L_hinge = sum over i, j of [margin + S_ij - S_ii]_+ + [margin + S_ij - S_jj]_+,   id of i and j not the same

K is a share of the patches of a picture and of the positions of a caption. Tokens are those of L_tok: after the final
norm, projected, of length 1, without padding, start and end. The pooled features stand for the class and end tokens.
Similarities are those of the micro-batch of all ranks; each rank computes those of its images.

The released code has no global term while its module is on; here it is the recipe's objective. The sum is over N^2
pairs, which AdamW does not see where it is the only term; beside the mean over N that a global term is, `weight: 1/N`
puts both on one scale. Encoder passes per pair: 1 image and 1 text.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.frameworks.base import Framework
from pipeline.model import DualEncoder, Features
from pipeline.model.tokens import check_tokens, image_with_tokens
from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_rows, gather_summed
from pipeline.preprocess import Preprocess
from pipeline.sections import Section

_SLOPE = 0.1
_TILE_BYTES = 256 << 20  # of token similarities at once


class FineLipConfig(Section):
    """FineLIP's own options; all but the weight, which has no counterpart there, are the paper's."""

    weight: PositiveFloat = Field(1.0, description="of the sum of hinges; 1/N of N pairs puts it beside a mean")
    margin: PositiveFloat = Field(0.2, description="between the similarity of a pair and that of its negatives")
    max_violation: bool = Field(False, description="only the worst negative of each image and caption counts")
    keep: float = Field(0.2, gt=0, le=1, description="tokens after aggregation, as a share of patches and positions")


class FineLip(Framework):
    """See the head of this file."""

    Config = FineLipConfig
    config: FineLipConfig

    def __init__(self, config: FineLipConfig, model: DualEncoder) -> None:
        super().__init__(config, model)
        check_tokens(model.clip)
        patches, width = _patches_and_width(model)
        self.patches = Aggregation(width, _share(config.keep, patches))
        self.words = Aggregation(width, _share(config.keep, model.context_length))

    def forward(
        self, model: DualEncoder, pixel_values: Tensor, input_ids: Tensor, extras: dict[str, Tensor], tokens: bool
    ) -> Features:
        """`further["image_parts"]`: [B, K + 1, D], `further["text_parts"]`: [B, K' + 1, D], normalised."""
        features = model.encode(pixel_values, input_ids, tokens=True)
        parts = self.parts(features)
        if not tokens:
            features = features._replace(image_tokens=None, text_tokens=None, text_mask=None)
        return features._replace(further=parts)

    def parts(self, features: Features) -> dict[str, Tensor]:
        """x and y of what was encoded with its tokens; see `forward`."""
        image, text, _, patches, words, mask, _ = features
        found = {}
        if image is not None and patches is not None:
            found["image_parts"] = _with_whole(self.patches(patches), image)
        if text is not None and words is not None:
            found["text_parts"] = _with_whole(self.words(words, mask), text)
        return found

    def terms(self, features: Features, ids: Tensor) -> dict[str, Tensor]:
        """`hinge`: the sum over all pairs of all ranks."""
        own = features.further
        assert own is not None
        exchange = Exchange()
        scores = late_interaction(own["image_parts"], own["text_parts"], exchange)
        loss = hinge(scores, exchange.gather(ids), self.config.margin, self.config.max_violation)
        return {"hinge": loss}

    def weights(self) -> dict[str, float]:
        """Constant."""
        return {"hinge": self.config.weight}


class Aggregation(nn.Module):
    """ATRM: K weighted means of tokens [B, N, D], whose weights the tokens themselves give: [B, K, D]."""

    def __init__(self, width: int, count: int, ratio: float = 0.2) -> None:
        super().__init__()
        hidden = _share(ratio, width)
        self.weigh = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, count))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of the tokens that the mask, bool [B, N], leaves; zeros where it leaves none."""
        logits = self.weigh(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if mask is None:
            weight = logits.softmax(1)
        else:
            logits = logits.masked_fill(~mask[..., None], torch.finfo(logits.dtype).min)
            weight = logits.softmax(1) * mask[..., None]
        return weight.to(tokens.dtype).transpose(1, 2) @ tokens


def late_interaction(image_parts: Tensor, text_parts: Tensor, exchange: Exchange) -> Tensor:
    """S of all images and captions of all ranks, [N, N], on every rank.

    Args:
        image_parts: [n, K, D] of this rank, normalised.
        text_parts: [n, K', D] of this rank, normalised.
        exchange: the ranks.
    """
    exact = torch.promote_types(image_parts.dtype, torch.float32)
    with torch.autocast(image_parts.device.type, enabled=False):
        x, y = image_parts.to(exact), gather_summed(text_parts, exchange, exact)
        pair = x.shape[1] * y.shape[1] * x.element_size()
        strip = max(1, _TILE_BYTES // (len(y) * pair))
        return gather_rows(torch.cat([clim(rows, y) for rows in x.split(strip)]), exchange)


def clim(x: Tensor, y: Tensor) -> Tensor:
    """CLIM: S of images [n, K, D] and captions [N, K', D]: [n, N]."""
    similarities = (x.flatten(0, 1) @ y.flatten(0, 1).T).view(*x.shape[:2], *y.shape[:2])
    # f rises, so it may come after the maximum. `max` keeps places only: the similarities do not outlive this function.
    of_patches, of_words = similarities.max(3).values, similarities.max(1).values
    return F.leaky_relu(of_patches, _SLOPE).mean(1) + F.leaky_relu(of_words, _SLOPE).mean(2)


def hinge(scores: Tensor, ids: Tensor, margin: float, max_violation: bool = False) -> Tensor:
    """The sum of hinges over scores [N, N] of images and captions; ids, int64 [N], equal for equal samples."""
    same = ids[:, None] == ids
    right = scores.diagonal()
    of_images = (margin + scores - right[:, None]).clamp(min=0).masked_fill(same, 0)
    of_captions = (margin + scores - right).clamp(min=0).masked_fill(same, 0)
    if max_violation:
        return of_images.max(1).values.sum() + of_captions.max(0).values.sum()
    return of_images.sum() + of_captions.sum()


def _with_whole(parts: Tensor, whole: Tensor) -> Tensor:
    return torch.cat([F.normalize(parts, dim=-1), whole[:, None]], dim=1)


def _share(ratio: float, count: int) -> int:
    return max(1, int(ratio * count))


def _patches_and_width(model: DualEncoder) -> tuple[int, int]:
    """Patches of a picture and the width of their features, found by looking at one."""
    tower: Any = model.clip.visual
    mode, weight = tower.training, next(tower.parameters())
    size = Preprocess.from_config(model.spec["preprocess_cfg"]).size
    tower.eval()
    with torch.no_grad():
        _, patches = image_with_tokens(tower, weight.new_zeros(1, 3, size, size))
    tower.train(mode)
    return patches.shape[1], patches.shape[2]
