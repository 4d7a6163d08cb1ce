"""Which layers get an adapter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pipeline.model.dual_encoder import DualEncoder

WORDS = ("attention", "mlp")


def reached_layers(model: DualEncoder) -> list[str]:
    """Names of the linear layers of both towers that a forward pass calls, in the order of the model.

    Some towers multiply by a layer's weight past the layer (OpenAI's ResNets pool so, BEiT's queries do): an adapter
    there would never be heard.
    """
    reached: set[str] = set()
    layers = {
        name: module
        for name, module in model.clip.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(("visual.", "text."))
    }
    handles = [m.register_forward_pre_hook(lambda _m, _x, name=n: reached.add(name)) for n, m in layers.items()]
    training = model.training
    size: Any = model.clip.visual.image_size  # type: ignore[union-attr]
    height, width = size if isinstance(size, tuple | list) else (size, size)
    parameter = next(model.parameters())
    picture = torch.zeros(1, 3, height, width, device=parameter.device, dtype=parameter.dtype)
    words = torch.tensor([[2, 3]], device=parameter.device)  # any will do: no tokenizer needs to be built
    try:
        with torch.no_grad():
            model.eval()(picture, words)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return [name for name in layers if name in reached]


def matching(layers: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The layers that a recipe's targets mean.

    Args:
        layers: those that can have an adapter.
        targets: `attention`, the projections of attention; `mlp`, the other layers of the blocks; or shell patterns.

    Raises:
        ValueError: a target means none of them; shows the nearest word, or what there is.
    """
    found: set[str] = set()
    for target in targets:
        meant = {n for n in layers if (_word_of(n) == target if target in WORDS else fnmatchcase(n, target))}
        if not meant:
            near = difflib.get_close_matches(target, WORDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {_examples(layers)}"
            raise ValueError(f"adapters.targets: '{target}' matches no linear layer that may train; {hint}")
        found |= meant
    return [name for name in layers if name in found]


def _word_of(name: str) -> str | None:
    """The word that means this layer: what the innermost part of its name speaks of; blocks are numbered."""
    if re.search(r"\.\d+\.", name) is None and "attn" not in name:
        return None
    for part in reversed(name.lower().split(".")):
        if "mlp" in part or "ffn" in part:
            return "mlp"
        if "attn" in part or "attention" in part:
            return "attention"
    return "mlp"


def _examples(layers: Sequence[str]) -> str:
    """The kinds of layers there are, their numbers left out."""
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in layers})
    return ", ".join(kinds[:12]) or "none"
