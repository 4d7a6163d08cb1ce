"""The sections of a recipe that say what is read and what is trained; the others are in `pipeline.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CaptionConfig(Section):
    """What of a caption a training pair gets, drawn anew every epoch by (seed, epoch, id).

    whole: all of it. sentences: a random choice of its sentences, in their order. rest: all but the first sentence.
    sub: a run of neighbouring sentences. The share 1 - `probability` of the captions stays whole.
    """

    sample: Literal["whole", "sentences", "rest", "sub"] = "whole"
    probability: float = Field(1.0, ge=0, le=1)


class AugmentConfig(Section):
    """What happens to a training picture before the model's own transform, drawn by (seed, epoch, id).

    crop_scale: a random crop of such a share of the area, its sides' ratio changed by up to `crop_ratio`. flip: the
    probability of mirroring; dense captions name left and right, so think first.
    """

    crop_scale: tuple[float, float] | None = None
    crop_ratio: float = Field(4 / 3, ge=1)
    flip: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _a_range(self) -> AugmentConfig:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale is two shares of the area, 0 < low <= high <= 1, not {self.crop_scale}")
        return self


class DataConfig(Section):
    """Where the pairs are. `set` is a folder of shards, a name under data/mds, or a URL (s3://bucket/set).

    Shards that are elsewhere, or compressed, come into `cache` when they are needed and stay there.
    """

    set: str
    cache: str | None = Field(None, description="folder; $PIPELINE_CACHE, else ~/.cache/hn-clip, when not given")
    train_split: str = "train"
    val_split: str | None = "val"
    workers: int = Field(2, ge=0, description="loader processes of each rank; 0 loads in the rank itself")
    captions: CaptionConfig = CaptionConfig()
    augment: AugmentConfig = AugmentConfig()
    max_bad_samples: int = Field(10, ge=0, description="unreadable samples, each replaced by the next, before it stops")


class FreezeConfig(Section):
    """Per tower: `none`, `all`, or a number N: what comes before the layers, and the first N of them."""

    image: Literal["none", "all"] | NonNegativeInt = "none"
    text: Literal["none", "all"] | NonNegativeInt = "none"


class AdapterConfig(Section):
    """Low-rank adapters (LoRA, DoRA) that train in place of the layers they stand on, and are merged when saved."""

    name: Literal["none", "lora", "dora"] = "none"
    r: PositiveInt = Field(16, description="rank of the update of a layer")
    alpha: PositiveFloat = Field(16, description="an update counts alpha / r times")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into an adapter, in training")
    targets: list[str] = Field(
        ["attention"], min_length=1, description="attention (q, k, v, out), mlp, or shell patterns of layer names"
    )


class ModelConfig(Section):
    """Which dual encoder, where its weights come from, and which of its parameters train.

    Weights are those of a run or of any file that `pipeline.model.formats` recognises. A context beyond the model's own
    stretches its position table as Long-CLIP does: the first `keep_positions` stay, the others are interpolated.
    """

    name: str = Field(description="a config in configs/models or its path, an open_clip name, or a file of weights")
    pretrained: str | None = Field(None, description="an open_clip tag or a weights file, for open_clip names")
    init: str | None = Field(None, description="start from this run, checkpoint, file, or newest run of this recipe")
    image_size: PositiveInt | None = Field(None, description="pixels; the model's own when not given")
    context_length: PositiveInt | None = Field(None, description="tokens a caption is cut to; the model's own if unset")
    keep_positions: NonNegativeInt = Field(20, description="positions that a stretched context leaves as they are")
    trainable: list[str] = Field(
        ["*"], description="shell patterns of what trains; beside adapters, where '*' is the temperature alone"
    )
    freeze: FreezeConfig = FreezeConfig()
    freeze_positions: PositiveInt | None = Field(None, description="positions that do not train, in Long-CLIP 20")
    patch_dropout: float | None = Field(None, ge=0, lt=1, description="share of the patches left out in training")
    grad_checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory")
