"""StructXLIP (CVPR 2026, arXiv 2602.20089): edge maps beside pictures, and captions without colours beside captions.

    L = L_objective(v, t) + w_SC InfoNCE(e, t_s) + w_RS mean (1 - cos(v, e)) + w_LSC L_LSC
    L_LSC = mean over spans c of  log sum_{all crops} exp(z_c.) - log sum_{own crops} exp(z_c.),
            z_ck = min(s / 0.07, 100) cos(Q(sum_{i in c} softmax(|x_i|) x_i), e_k)

e encodes the edge map of the picture, e_k those of parts of it, t_s the caption without its words of colour, material
and texture. Spans are windows of words over t_s, x_i the tokens of its own encoding, Q the tower's final norm, once,
and projection. s of the own terms is a constant. Pairs without any edge count in no own term. Negatives are those of
all ranks, where the released code takes a rank's own. Our s goes up to 100 as everywhere; there it ends at 33.

Each weight stays for the first tenth of the run, then falls by half a cosine to its floor at eight tenths: the paper's
epochs 1 and 8 of 10, continuously. Its warm-up over one epoch is at the full weight from the start.

Maps are made in the loader out of the picture as the model sees it. Parts are the boxes of the shards, and where a pair
has too few, squares of several sizes with the most edges. Edge maps that a list names are in no shards.

Encoder passes per pair: 2 + K images and 2 texts, a call each.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from open_clip.hf_model import ClsPooler, HFTextEncoder
from open_clip.transformer import TextTransformer
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.views import Views
from pipeline.frameworks.base import Framework, mean_over_ranks
from pipeline.frameworks.longclip import stack_texts
from pipeline.frameworks.structxlip.boxes import squares
from pipeline.frameworks.structxlip.edges import THRESHOLDS, EdgeOperator
from pipeline.frameworks.structxlip.filters import CaptionFilter, phrases_of
from pipeline.frameworks.structxlip.losses import infonce_of, local_loss, span_features
from pipeline.frameworks.structxlip.views import StructureViews
from pipeline.frameworks.structxlip.windows import WordTokens
from pipeline.model import DualEncoder, Features
from pipeline.model.last_layer import TextTokens, image_head, image_last_layer, text_head, text_last_layer
from pipeline.objective import InfoNCELoss
from pipeline.preprocess import Preprocess
from pipeline.sections import Section

MAX_LOCAL_SCALE = 100.0


class StructXlipConfig(Section):
    """StructXLIP's own options; weights, floors, crops and windows are the defaults of the released code."""

    structure_weight: float = Field(0.5, ge=0, description="of edge maps against filtered captions")
    consistency_weight: float = Field(0.05, ge=0, description="of pictures and their edge maps")
    local_weight: float = Field(0.1, ge=0, description="of parts and words; 0 leaves them out, and K is 0")
    structure_floor: float = Field(0.7, ge=0, le=1, description="share of the weight that stays to the end")
    consistency_floor: float = Field(0.5, ge=0, le=1, description="likewise")
    local_floor: float = Field(0.4, ge=0, le=1, description="likewise")
    decay: tuple[float, float] = Field((0.1, 0.8), description="from when to when weights fall, in shares of the run")
    operator: Literal["canny", "sobel", "log"] = Field("canny", description="what finds edges")
    thresholds: tuple[float, float] | None = Field(
        None, description="no edge below the first, a full one from the second on; the operator's own when not given"
    )
    sigma: float = Field(1.0, ge=0, description="of the Gaussian before the operator, pixels of the model's input")
    lexicons: tuple[str, ...] = Field(
        ("colours", "materials", "textures"), description="words to leave out; or text files, a phrase in a line"
    )
    boxes: Literal["shards", "proposed"] = Field(
        "shards", description="of the parts: from the shards, proposed where they are too few; or always proposed"
    )
    crops: PositiveInt = Field(3, description="K, parts of a picture")
    scales: tuple[float, ...] = Field(
        (0.35, 0.5), min_length=1, description="sides of proposed boxes, in sides of the picture"
    )
    window: PositiveInt = Field(3, description="words of a window over a clause of 5 to 10; longer ones have more")
    stride: PositiveInt = Field(1, description="words from one window to the next")
    max_spans: PositiveInt = Field(64, description="windows of a caption, from its beginning")
    temperature: PositiveFloat = Field(0.07, description="divides the scale of the local term")

    @model_validator(mode="after")
    def _sense(self) -> StructXlipConfig:
        if not (self.structure_weight or self.consistency_weight or self.local_weight):
            raise ValueError("all weights are 0: leave the framework out")
        if not 0 <= self.decay[0] <= self.decay[1] <= 1:
            raise ValueError(f"decay is two shares of the run, 0 <= start <= end <= 1, not {self.decay}")
        if self.thresholds is not None and not 0 <= self.thresholds[0] < self.thresholds[1]:
            raise ValueError(f"thresholds are 0 <= low < high, not {self.thresholds}")
        if not all(0 < scale < 1 for scale in self.scales):
            raise ValueError(f"scales are shares of a side, above 0 and below 1, not {self.scales}")
        return self


class StructXlip(Framework):
    """See the head of this file."""

    Config = StructXlipConfig
    config: StructXlipConfig

    def __init__(self, config: StructXlipConfig, model: DualEncoder) -> None:
        super().__init__(config, model)
        self.num_crops = config.crops if config.local_weight else 0
        if self.num_crops:
            _check_tokens(model.clip.text)
        self.pad_id, self.no_words = model.pad_id, model.no_words
        self.preprocess = Preprocess.from_config(model.spec["preprocess_cfg"])
        self.tried = squares(self.preprocess.size, config.scales)
        self.caption_filter = CaptionFilter(phrases_of(config.lexicons))
        self.structure_loss = InfoNCELoss()
        self.progress = 0.0

    def views(self, preprocess: Preprocess) -> Views:
        """Edge maps and filtered captions."""
        config = self.config
        return StructureViews(
            preprocess,
            EdgeOperator(config.operator, config.thresholds or THRESHOLDS[config.operator], config.sigma),
            self.caption_filter,
            WordTokens(self.no_words),
            window=(config.window, config.stride, config.max_spans),
            from_shards=config.boxes == "shards",
            num_crops=self.num_crops,
            tried=self.tried,
        )

    def forward(
        self, model: DualEncoder, pixel_values: Tensor, input_ids: Tensor, extras: dict[str, Tensor], tokens: bool
    ) -> Features:
        """`further`: features of edges, structure [B, D], crops [B, K, D], spans [B, S, D]; bool, which there are."""
        edges = extras["edges"]
        features = self._encode(
            model,
            torch.cat([pixel_values, self._as_pixels(edges.flatten(0, 1), pixel_values)]),
            stack_texts([input_ids, extras["structure_ids"]], self.pad_id),
            extras.get("spans"),
            tokens,
        )
        own = features.further
        assert own is not None
        maps = own.pop("edge_maps").unflatten(0, edges.shape[:2])
        there = edges.flatten(2).amax(-1) > 0
        own |= {"edge_features": maps[:, 0], "has_edges": there[:, 0]}
        if self.num_crops:
            spans = extras["spans"]
            own |= {"crop_features": maps[:, 1:], "has_crop": there[:, 1:], "has_span": spans[..., 0] < spans[..., 1]}
        return features

    def _as_pixels(self, maps: Tensor, like: Tensor) -> Tensor:
        """Maps uint8 [n, H, W] as the model reads pictures: [n, 3, H, W]."""
        values = self.preprocess.mean, self.preprocess.std
        mean, std = (torch.tensor(channels, device=maps.device)[:, None, None] for channels in values)
        return ((maps[:, None] / 255 - mean) / std).to(like.dtype)

    def _encode(
        self, model: DualEncoder, pictures: Tensor, texts: Tensor, spans: Tensor | None, tokens: bool
    ) -> Features:
        """Features of the pairs, the first of pictures and of texts; the others' in `further`."""
        visual, text, size = model.clip.visual, model.clip.text, len(texts) // 2
        seen = image_last_layer(visual, pictures) if tokens else None
        said = text_last_layer(text, texts, self.no_words) if tokens or spans is not None else None
        images = F.normalize(model.encode_image(pictures) if seen is None else seen.pooled, dim=-1)
        words = F.normalize(model.encode_text(texts) if said is None else said.pooled, dim=-1)
        further = {"edge_maps": images[size:], "structure_features": words[size:]}
        if spans is not None:
            assert said is not None
            further["span_features"] = _spans(text, said, size, spans)
        features = Features(images[:size], words[:size], model.logit_scale(), further=further)
        if not tokens:
            return features
        assert seen is not None
        assert said is not None
        return features._replace(
            image_tokens=F.normalize(image_head(visual, seen.tokens[:size]), dim=-1),
            text_tokens=F.normalize(text_head(text, said.tokens[:size]), dim=-1),
            text_mask=said.words[:size],
        )

    def terms(self, features: Features, ids: Tensor) -> dict[str, Tensor]:
        """`structure`, `consistency`, and `local` where it counts."""
        own = features.further
        assert own is not None
        assert features.image_features is not None
        edges, there = own["edge_features"], own["has_edges"]
        scale = features.logit_scale.detach()
        agreement = (features.image_features.float() * edges.float()).sum(-1)
        values = {
            "structure": infonce_of(self.structure_loss, edges, own["structure_features"], scale, ids, there),
            "consistency": mean_over_ranks(1 - agreement, there),
        }
        if self.num_crops:
            local_scale = (scale / self.config.temperature).clamp(max=MAX_LOCAL_SCALE)
            masks = own["has_span"], own["has_crop"]
            values["local"] = local_loss(own["span_features"], own["crop_features"], *masks, local_scale, ids)
        return values

    def weights(self) -> dict[str, float]:
        """On their way from the options to their floors."""
        config = self.config
        weights = {
            "structure": config.structure_weight * self._share_left(config.structure_floor),
            "consistency": config.consistency_weight * self._share_left(config.consistency_floor),
        }
        if self.num_crops:
            weights["local"] = config.local_weight * self._share_left(config.local_floor)
        return weights

    def set_progress(self, progress: float) -> None:
        """See `Framework.set_progress`."""
        self.progress = progress

    def _share_left(self, floor: float) -> float:
        start, end = self.config.decay
        if self.progress <= start:
            return 1.0
        fallen = min((self.progress - start) / (end - start), 1.0) if end > start else 1.0
        return floor + (1 - floor) * (1 + math.cos(math.pi * fallen)) / 2


def _spans(text: Any, said: TextTokens, size: int, spans: Tensor) -> Tensor:
    """Features of spans of the filtered captions, which are encoded after `size` others."""
    return span_features(partial(text_head, text), said.tokens[size:], (spans - said.first).clamp(min=0))


def _check_tokens(text: Any) -> None:
    by_last = isinstance(text, HFTextEncoder) and isinstance(text.pooler, ClsPooler)
    if not isinstance(text, TextTransformer | HFTextEncoder) or (by_last and text.pooler.cls_token_position != 0):
        raise ValueError(
            f"the text tower {type(text).__name__} gives no features per token for structxlip's local term: set "
            "framework.local_weight to 0, or train a model whose text tower does"
        )
