"""Long-CLIP (ECCV 2024, arXiv 2403.15378): a short caption beside the long one, against the image's main components.

    L = L_objective(v, t_long) + short_weight InfoNCE(PCA_k(v), t_short)

t_short encodes the first sentence. PCA_k(v) centres the normalised image features, keeps the k directions of largest
variance and adds the mean again; it is not normalised. The released code takes the components of a rank's own
micro-batch, where k = 32 of at most 32 rows keeps everything; here they are those of the global batch, on any number of
ranks. Label smoothing 0.1 is the paper's, in both terms; that of the long one is the objective's own option. Frozen
first 20 positions are `model.freeze_positions: 20`. Encoder passes per pair: 1 image and 2 texts, in one call.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.captions import split_sentences
from pipeline.data.views import Views
from pipeline.frameworks.base import Framework
from pipeline.model import DualEncoder, Features
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.objective import InfoNCELoss
from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_summed
from pipeline.preprocess import Preprocess
from pipeline.sections import Section


class LongClipConfig(Section):
    """Long-CLIP's own options."""

    short_weight: float = Field(1.0, ge=0, description="of the short caption's term; 0 leaves the branch out")
    components: PositiveInt = Field(32, description="main components of the image features that meet short captions")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="of the short caption's term")


class FirstSentence(Views):
    """The first sentence of the caption that was drawn."""

    def of_pair(self, sample: dict[str, Any], image: Image.Image, caption: str, draw: random.Random) -> dict[str, Any]:
        """See `Views.of_pair`."""
        return {"short": split_sentences(caption)[0]}

    def collate(self, pairs: Sequence[dict[str, Any]], tokenizer: CaptionTokenizer) -> dict[str, Tensor]:
        """`short_ids`: int64 [B, L]."""
        return {"short_ids": tokenizer([pair["short"] for pair in pairs])}


class LongClip(Framework):
    """See the head of this file."""

    Config = LongClipConfig
    config: LongClipConfig

    def __init__(self, config: LongClipConfig, model: DualEncoder) -> None:
        super().__init__(config, model)
        self.short_loss = InfoNCELoss(label_smoothing=config.label_smoothing)
        self.pad_id = model.pad_id

    def views(self, preprocess: Preprocess) -> Views | None:
        """The short captions, where they count."""
        return FirstSentence() if self.config.short_weight else None

    def forward(
        self, model: DualEncoder, pixel_values: Tensor, input_ids: Tensor, extras: dict[str, Tensor], tokens: bool
    ) -> Features:
        """`further["short_features"]`: [B, D], normalised."""
        if "short_ids" not in extras:
            return model.encode(pixel_values, input_ids, tokens)
        images = model.encode(pixel_values, None, tokens)
        texts = model.encode(None, stack_texts([input_ids, extras["short_ids"]], self.pad_id), tokens)
        long, short = texts.text_features.chunk(2)  # type: ignore[union-attr]
        return images._replace(
            text_features=long,
            text_tokens=None if texts.text_tokens is None else texts.text_tokens[: len(long)],
            text_mask=None if texts.text_mask is None else texts.text_mask[: len(long)],
            further={"short_features": short},
        )

    def terms(self, features: Features, ids: Tensor) -> dict[str, Tensor]:
        """`short`: InfoNCE of the images' main components and the short captions over all ranks, if it counts."""
        if features.further is None:
            return {}
        assert features.image_features is not None
        main = main_components(features.image_features, self.config.components)
        loss = self.short_loss(main, features.further["short_features"], features.logit_scale, ids=ids)
        return {"short": loss}

    def weights(self) -> dict[str, float]:
        """Constant."""
        return {"short": self.config.short_weight}


def main_components(features: Tensor, components: int) -> Tensor:
    """Rows [n, D] of this rank, projected on the first principal components of the rows of all ranks, mean included.

    Gradients flow through the centred rows and the mean. The directions are constants: those of nearly equal variance
    have no stable gradient.
    """
    exchange = Exchange()
    features = features.float()
    everyone = gather_summed(features, exchange, torch.float32)
    mean = everyone.mean(dim=0, keepdim=True)
    with torch.no_grad():
        _, _, directions = torch.linalg.svd(everyone - mean, full_matrices=False)
    basis = directions[:components]
    return (features - mean) @ basis.T @ basis + mean


def stack_texts(parts: Sequence[Tensor], pad_id: int) -> Tensor:
    """Token ids [B, L_i] below each other, padded to the longest: one call of the text tower."""
    length = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=pad_id) for part in parts])
