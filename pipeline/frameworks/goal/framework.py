"""GOAL (CVPR 2025, arXiv 2503.17782): parts of pictures and captions, and their tokens inside the whole.

    L = L_objective(v, t) + segment_weight InfoNCE(v', t') + patch_weight L_patch + text_weight L_text
    L_patch = mean (1 - cos(P(mean of the patch tokens in the box), v'))^2
    L_text  = mean (1 - cos(Q(mean of the text tokens of the sentence), t'))^2

v', t' encode a local pair: a part of the picture cut out by its box, and its sentence. Tokens are those of the last
layer; P, Q are the towers' own final norm and projection. Gradients go to both sides of every term.

Boxes and sentences are those of the shards. A pair without them has one of its sentences drawn, and its box is the one
of many, of several sizes, whose mean patch token is nearest to the sentence under the model as it is. Nothing runs
before the training.

Encoder passes per pair: 2 images and 2 texts. Sentences are encoded apart from captions, which are many times longer;
whole and cut-out pictures together, unless a box is to be proposed first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.views import Views
from pipeline.frameworks.base import Framework, mean_over_ranks
from pipeline.frameworks.goal.boxes import PatchGrid, candidates, cut_out, mean_of, members
from pipeline.frameworks.goal.views import LocalPairs
from pipeline.model import DualEncoder, Features
from pipeline.model.last_layer import (
    ImageTokens,
    TextTokens,
    check_last_layer,
    image_head,
    image_last_layer,
    text_head,
    text_last_layer,
)
from pipeline.objective import InfoNCELoss
from pipeline.preprocess import Preprocess
from pipeline.sections import Section


class GoalConfig(Section):
    """GOAL's own options; weights and `region` are the paper's."""

    segment_weight: float = Field(0.5, ge=0, description="of the contrastive term of local pairs")
    patch_weight: float = Field(1.0, ge=0, description="of the alignment of boxes inside the picture")
    text_weight: float = Field(1.0, ge=0, description="of the alignment of sentences inside the caption")
    boxes: Literal["shards", "proposed"] = Field(
        "shards", description="from the shards, proposed where a pair has none; or always proposed"
    )
    region: Literal["best", "random"] = Field(
        "best", description="which of a pair's regions: the most similar, every time, or one drawn anew each epoch"
    )
    scales: tuple[float, ...] = Field(
        (0.25, 0.35, 0.5, 0.7), min_length=1, description="sides of proposed boxes, in sides of the picture"
    )
    copy_scale: float = Field(
        2.0, ge=1, description="side of the copy that proposed boxes are cut out of, in sides of the model's input"
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> GoalConfig:
        if not all(0 < scale <= 1 for scale in self.scales):
            raise ValueError(f"scales are shares of a side, above 0 and at most 1, not {self.scales}")
        if not (self.segment_weight or self.patch_weight or self.text_weight):
            raise ValueError("all weights are 0: leave the framework out")
        return self


class Goal(Framework):
    """See the head of this file."""

    Config = GoalConfig
    config: GoalConfig
    tried: Tensor  # int64 [N, 4], boxes to propose, in patches
    tried_patches: Tensor  # bool [N, P], the patches in each

    def __init__(self, config: GoalConfig, model: DualEncoder) -> None:
        super().__init__(config, model)
        check_last_layer(model.clip)
        self.preprocess = Preprocess.from_config(model.spec["preprocess_cfg"])
        self.no_words = model.no_words
        self.grid = PatchGrid.of(model.clip.visual, self.preprocess.size)
        boxes = candidates(self.grid, config.scales)
        self.register_buffer("tried", boxes, persistent=False)
        self.register_buffer("tried_patches", members(boxes, self.grid), persistent=False)
        self.segment_loss = InfoNCELoss()

    def views(self, preprocess: Preprocess) -> Views:
        """A local pair of every pair."""
        config = self.config
        from_shards = config.boxes == "shards"
        return LocalPairs(preprocess, self.grid, self.no_words, from_shards, config.region, config.copy_scale)

    def forward(
        self, model: DualEncoder, pixel_values: Tensor, input_ids: Tensor, extras: dict[str, Tensor], tokens: bool
    ) -> Features:
        """`further`: crop, sentence, box and span features, [B, D], normalised; bool [B], which have box and span."""
        visual, text = model.clip.visual, model.clip.text
        partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        caption = text_last_layer(text, input_ids, self.no_words)
        sentence = model.encode_text(extras["sentence_ids"], normalize=True)
        # Under ZeRO-3 the ranks must call towers and heads equally often, whatever pairs they have.
        if "proposed" in extras or partitioned:
            picture = image_last_layer(visual, pixel_values)
            crops, patches = self._local_pictures(model, picture, sentence, pixel_values, extras)
            crop = model.encode_image(crops)
        else:
            patches = extras["patches"]
            both = image_last_layer(visual, torch.cat([pixel_values, extras["crops"]]))
            whole, crop = both.pooled.chunk(2)
            picture = both._replace(pooled=whole, tokens=both.tokens[: len(whole)])
        span = extras["span"][:, caption.first :]
        return _whole(model, picture, caption, tokens)._replace(
            further={
                "crop_features": F.normalize(crop, dim=-1),
                "sentence_features": sentence,
                "box_features": _of_mean(partial(image_head, visual), picture.tokens, patches),
                "span_features": _of_mean(partial(text_head, text), caption.tokens, span),
                "has_box": patches.any(1),
                "has_span": span.any(1),
            }
        )

    @torch.no_grad()
    def _local_pictures(
        self,
        model: DualEncoder,
        picture: ImageTokens,
        sentence: Tensor,
        pixel_values: Tensor,
        extras: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Crops [B, 3, H, W] and bool [B, P], the patches in their boxes; proposed where the shards had none."""
        means = F.normalize(image_head(model.clip.visual, mean_of(picture.tokens, self.tried_patches)), dim=-1)
        nearest = torch.einsum("bnd,bd->bn", means.float(), sentence.float()).argmax(1)
        if "proposed" not in extras:
            return extras["crops"], extras["patches"]
        patches, crops = self.tried_patches[nearest], self._cut(nearest, pixel_values, extras)
        if "crops" in extras:
            proposed = extras["proposed"]
            patches = torch.where(proposed[:, None], patches, extras["patches"])
            crops = torch.where(proposed[:, None, None, None], crops, extras["crops"])
        return crops, patches

    def _cut(self, nearest: Tensor, pixel_values: Tensor, extras: dict[str, Tensor]) -> Tensor:
        """The boxes of these numbers [B] out of the pictures, as the model reads them."""
        size, grid = self.preprocess.size, self.grid
        patch = torch.tensor([grid.width, grid.height] * 2, device=nearest.device) / size
        boxes = self.tried[nearest] * patch
        if "pictures" not in extras:
            return cut_out(pixel_values.float(), boxes, size).to(pixel_values.dtype)
        values = self.preprocess.mean, self.preprocess.std
        mean, std = (torch.tensor(channels, device=nearest.device)[:, None, None] for channels in values)
        crops = cut_out(extras["pictures"].float(), boxes, size) / 255
        return ((crops - mean) / std).to(pixel_values.dtype)

    def terms(self, features: Features, ids: Tensor) -> dict[str, Tensor]:
        """`segment`, `patch` and `text`."""
        own = features.further
        assert own is not None
        crop, sentence = own["crop_features"], own["sentence_features"]
        return {
            "segment": self.segment_loss(crop, sentence, features.logit_scale, ids=ids),
            "patch": mean_over_ranks(_gap(own["box_features"], crop), own["has_box"]),
            "text": mean_over_ranks(_gap(own["span_features"], sentence), own["has_span"]),
        }

    def weights(self) -> dict[str, float]:
        """Constant."""
        config = self.config
        return {"segment": config.segment_weight, "patch": config.patch_weight, "text": config.text_weight}


def _whole(model: DualEncoder, picture: ImageTokens, caption: TextTokens, tokens: bool) -> Features:
    """What `DualEncoder.encode` gives of the pairs, out of passes that have been made."""
    features = Features(F.normalize(picture.pooled, dim=-1), F.normalize(caption.pooled, dim=-1), model.logit_scale())
    if not tokens:
        return features
    return features._replace(
        image_tokens=F.normalize(image_head(model.clip.visual, picture.tokens), dim=-1),
        text_tokens=F.normalize(text_head(model.clip.text, caption.tokens), dim=-1),
        text_mask=caption.words,
    )


def _of_mean(head: Callable[[Tensor], Tensor], tokens: Tensor, chosen: Tensor) -> Tensor:
    """Features [B, D], normalised, of the mean of the chosen tokens; bool [B, P] of tokens [B, P, W]."""
    return F.normalize(head(mean_of(tokens, chosen[:, None])[:, 0]), dim=-1)


def _gap(part: Tensor, target: Tensor) -> Tensor:
    """(1 - cos)^2 of rows [B, D] of length 1, in float32: [B]."""
    return (1 - (part.float() * target.float()).sum(-1)).square()
