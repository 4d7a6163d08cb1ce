"""Adapters as files of their own: peft's two, and what else of the model trained.

adapter_model.safetensors   the adapters, in peft's names
adapter_config.json         what peft makes them from
beside.safetensors          what trained beside them, in open_clip's names: the temperature, and what the recipe names
backbone.json               a hash of everything else, which they stand on
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.model.adapters.attention import PARTS, pack_attention, split_attentions
from pipeline.model.adapters.base import NAME, Adapters, inject, is_adapter
from pipeline.model.dual_encoder import DualEncoder
from pipeline.runs import read_json

WEIGHTS, CONFIG, BESIDE, BACKBONE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "beside.safetensors",
    "backbone.json",
)
_PREFIX = "base_model.model."  # peft's own model is a wrapper


class AdapterFiles(NamedTuple):
    """Contents by file name."""

    tensors: dict[str, dict[str, Tensor]]
    json: dict[str, Any]


def adapter_files(model: DualEncoder, trained: dict[str, Tensor]) -> AdapterFiles:
    """The files of a model's adapters.

    Args:
        model: with adapters; under ZeRO it may hold parts of them only.
        trained: the whole tensors of everything that trains, by parameter name; those of a framework are left out.
    """
    from peft import get_peft_model_state_dict

    clip: Any = model.clip
    assert model.adapters is not None
    own = {name for name, _ in clip.named_parameters()}
    adapters = {name: tensor for name, tensor in trained.items() if is_adapter(name) and name in own}
    beside = {name: tensor for name, tensor in trained.items() if not is_adapter(name) and name in own}
    named = get_peft_model_state_dict(clip, adapters, NAME)
    config = {**clip.peft_config[NAME].to_dict(), "inference_mode": True}
    return AdapterFiles(
        {WEIGHTS: {f"{_PREFIX}{name}": tensor for name, tensor in named.items()}, BESIDE: beside},
        {
            CONFIG: {key: sorted(v) if isinstance(v, set) else v for key, v in sorted(config.items())},
            BACKBONE: {"xxh3_128": model.adapters.frozen},
        },
    )


def load_adapter(model: DualEncoder, folder: str | Path) -> None:
    """Put saved adapters on the model that they were trained on, in place, and set what trained beside them.

    `pipeline.model.adapters.merge_adapters` makes it a plain model again.

    Args:
        model: the backbone of the run, as its recipe's `model` section builds it.
        folder: `adapter/` in a checkpoint.

    Raises:
        FileNotFoundError: the folder does not hold adapters.
        ValueError: the model is another one than they were trained on, or has adapters already.
    """
    from peft import LoraConfig, set_peft_model_state_dict

    folder = Path(folder)
    if missing := [name for name in (WEIGHTS, CONFIG, BESIDE, BACKBONE) if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} holds no adapters: {', '.join(missing)} missing. They are in a checkpoint's adapter/"
        )
    if model.adapters is not None:
        raise ValueError("the model has adapters already: merge them first")
    clip: Any = model.clip
    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    layers = list(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["target_modules"])
    attentions = split_attentions(clip)
    for attention in list(attentions):
        if not any(f"{attention.name}.{part}" in layers for part in PARTS):
            pack_attention(clip, attention)
            attentions.remove(attention)
    known = {name for name, _ in clip.named_modules()}
    if strange := [name for name in layers if name not in known]:
        raise ValueError(f"{folder} is of another model: this one has no layer {strange[0]}")
    inject(clip, config, layers)
    beside = load_file(folder / BESIDE)
    for name, parameter in clip.named_parameters():
        parameter.requires_grad_(name in beside or is_adapter(name))
    adapters = Adapters.of(clip, layers, attentions, config.lora_alpha / config.r)
    if adapters.frozen != read_json(folder / BACKBONE)["xxh3_128"]:
        raise ValueError(
            f"{folder} was trained on other weights than this model's: build it as the run's recipe.yaml says "
            "(model.name, pretrained, init, context_length)"
        )
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    result: Any = set_peft_model_state_dict(clip, weights, NAME)
    assert not result.unexpected_keys
    with torch.no_grad():
        for name, tensor in beside.items():
            clip.get_parameter(name).copy_(tensor)
    model.adapters = adapters
