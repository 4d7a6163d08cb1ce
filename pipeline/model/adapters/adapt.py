"""Putting adapters on a model, and merging them into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeline.model.adapters.attention import pack_attention, split_attentions
from pipeline.model.adapters.base import Adapters, inject, is_adapter
from pipeline.model.adapters.targets import matching, reached_layers
from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.freeze import freeze_layers, set_trainable
from pipeline.sections import AdapterConfig, FreezeConfig

EVERYTHING, TEMPERATURE = ["*"], ["logit_scale"]


def adapt(model: DualEncoder, config: AdapterConfig, trainable: Sequence[str], freeze: FreezeConfig) -> tuple[int, int]:
    """Put adapters on a model that has none, in place; random numbers come from torch's generator.

    Args:
        model: its `adapters` are set.
        config: which kind, how large, and on which layers. Not on those that `freeze` names.
        trainable: shell patterns of what trains beside the adapters, under open_clip's names. `["*"]`, a recipe's
            default, is the temperature alone. The own weights of an adapted layer never train, nor does what is packed
            with them.
        freeze: as in `freeze_layers`.

    Returns:
        How many parameters train, and how many are frozen.

    Raises:
        ValueError: a pattern matches nothing, or an attention cannot be taken apart.
    """
    from peft import LoraConfig

    clip = model.clip
    set_trainable(clip, EVERYTHING)
    freeze_layers(clip, freeze)
    adaptable = _training(clip)
    set_trainable(clip, TEMPERATURE if list(trainable) == EVERYTHING else trainable)
    freeze_layers(clip, freeze)
    beside = _training(clip)
    attentions = split_attentions(clip)
    of_part = {f"{a.name}.{p}": a.weight_of(p) for a in attentions for p in ("q_proj", "k_proj", "v_proj")}
    open_to = [n for n in reached_layers(model) if of_part.get(n, f"{n}.weight") in adaptable]
    layers = matching(open_to, config.targets)
    needed = [a for a in attentions if any(name.startswith(f"{a.name}.") and name in of_part for name in layers)]
    for attention in attentions:
        if attention not in needed:
            pack_attention(clip, attention)
    alpha: Any = config.alpha  # peft says int, and divides by r
    wanted = LoraConfig(r=config.r, lora_alpha=alpha, lora_dropout=config.dropout, use_dora=config.name == "dora")
    inject(clip, wanted, layers)
    for name, parameter in clip.named_parameters():
        parameter.requires_grad_(name in beside or is_adapter(name))
    model.adapters = Adapters.of(clip, layers, needed, config.alpha / config.r)
    sizes = [(parameter.requires_grad, parameter.numel()) for parameter in clip.parameters()]
    return sum(n for trains, n in sizes if trains), sum(n for trains, n in sizes if not trains)


def merge_adapters(model: DualEncoder) -> None:
    """Merge the adapters into the weights, in place: the model has the backbone's own modules and names afterwards."""
    adapters: Any = model.adapters
    assert adapters is not None, "the model has adapters"
    state = model.encoder_state()
    clip: Any = model.clip
    for name in adapters.layers:
        parent, _, own = name.rpartition(".")
        setattr(clip.get_submodule(parent), own, clip.get_submodule(name).get_base_layer())
    for attention in adapters.attentions:
        pack_attention(clip, attention)
    del clip.peft_config
    model.adapters = None
    with torch.no_grad():
        model.load_encoder_state(state)


def _training(clip: nn.Module) -> set[str]:
    return {name for name, parameter in clip.named_parameters() if parameter.requires_grad}
