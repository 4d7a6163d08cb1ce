"""Small models of every kind of tower, with and without adapters."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.model import DualEncoder
from pipeline.model.adapters import adapt
from pipeline.sections import AdapterConfig, FreezeConfig
from tests.fixtures import tiny_clip
from tests.model.test_layers import BERT, LITE, RESNET

VIT = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 16, "head_width": 16}
OWN = {"qk_norm": True, "scale_heads": True}  # open_clip's own attention instead of torch's
TOWERS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (VIT, {}),
    "own attention": (VIT | OWN | {"scale_attn_inner": True}, OWN),
    "class token at the end": (VIT, {"embed_cls": True}),  # a mask per head
    "attentional pooler": (VIT | {"attentional_pool": True, "attn_pooler_heads": 2}, {}),  # keys of another width
    "convolutions and BERT": (LITE, BERT),
    "timm": ({"timm_model_name": "test_vit2", "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}, {}),
    "OpenAI's ResNet": (RESNET, {}),
}
PLAIN = {"trainable": ["*"], "freeze": FreezeConfig()}


def inputs(model: DualEncoder) -> tuple[Tensor, Tensor]:
    size = model.spec["preprocess_cfg"]["size"]
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[320, 736, 2840, 49407, 0, 0], [1237, 3255, 682, 1601, 525, 49407]])
    return pixels, ids % model.clip.vocab_size


def features(model: DualEncoder) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = model.eval()(*inputs(model))
    assert found.image_features is not None
    assert found.text_features is not None
    return found.image_features, found.text_features


def move(model: DualEncoder, size: float = 0.1) -> None:
    """What training would do: every trainable parameter somewhere else."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.clip.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@cache
def _built(towers: str) -> DualEncoder:
    vision, text = TOWERS[towers]
    with tempfile.TemporaryDirectory() as folder:
        return tiny_clip(Path(folder), vision, **text)


def backbone(towers: str = "plain") -> DualEncoder:
    """A model without adapters, always with the same weights."""
    return copy.deepcopy(_built(towers))


def adapted(kind: str = "lora", towers: str = "plain", **options: Any) -> DualEncoder:
    model = backbone(towers)
    torch.manual_seed(3)
    adapt(model, AdapterConfig(name=kind, r=4, alpha=6, **options), **PLAIN)
    return model


def trains(model: DualEncoder) -> set[str]:
    return {name for name, parameter in model.clip.named_parameters() if parameter.requires_grad}
