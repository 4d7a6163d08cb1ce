"""Adapters on a model: low-rank updates of linear layers that train while the layers' own weights stay.

LoRA (Hu et al., arXiv 2106.09685) adds s B A to a weight W [out, in], with A [r, in], B [out, r] and s = alpha / r.
DoRA (Liu et al., arXiv 2402.09353) trains the lengths of the rows as well, m [out], at first those of W:

    LoRA: W' = W + s B A          DoRA: W' = m (W + s B A) / ||W + s B A||, row by row

The layers are peft's own. Merged, W' takes the place of W, and the model is the backbone's own architecture again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipeline.model.adapters.attention import Packed

NAME = "default"  # of the one adapter that a model has, as peft calls it
_TOWERS = {"visual.": "image", "text.": "text"}
_KINDS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")


@dataclass(frozen=True)
class Adapters:
    """What adapters a model has.

    Attributes:
        layers: names of the layers that have one; those of packed attention are `q_proj`, `k_proj` and `v_proj`.
        attentions: those that are taken apart.
        scale: s = alpha / r.
        num_parameters: theirs.
        frozen: a hash of everything that does not train, under the names that it has beside the adapters.
    """

    layers: tuple[str, ...]
    attentions: tuple[Packed, ...]
    scale: float
    num_parameters: int
    frozen: str

    @classmethod
    def of(cls, clip: nn.Module, layers: Sequence[str], attentions: Sequence[Packed], scale: float) -> Adapters:
        """Those that are on a model; what trains beside them has its gradient."""
        count = sum(parameter.numel() for name, parameter in clip.named_parameters() if is_adapter(name))
        return cls(tuple(layers), tuple(attentions), scale, count, hash_of_frozen(clip))

    def describe(self) -> str:
        """On which layers they are, and how many parameters they have."""
        towers = ((sum(n.startswith(prefix) for n in self.layers), tower) for prefix, tower in _TOWERS.items())
        where = " and ".join(f"{count} layers of the {tower} tower" for count, tower in towers if count)
        kinds = sorted({".".join(p for p in n.split(".")[-2:] if not p.isdecimal()) for n in self.layers})
        return f"on {where} ({', '.join(kinds)}): {self.num_parameters:,} parameters"

    def merged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The encoders with the adapters merged, under open_clip's names and in the backbone's own shapes.

        Args:
            state: the model with its adapters, under the names that it has now. Products are taken in float64; a merged
                weight has the precision of its adapter.
        """
        state = dict(state)
        for layer in self.layers:
            a, b = (state.pop(f"{layer}.{side}.{NAME}.weight") for side in ("lora_A", "lora_B"))
            weight = state.pop(f"{layer}.base_layer.weight").double() + self.scale * b.double() @ a.double()
            length = state.pop(f"{layer}.lora_magnitude_vector.{NAME}.weight", None)
            if length is not None:
                weight *= (length.double() / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)
            state[f"{layer}.weight"] = weight.to(b.dtype)
            if (bias := state.pop(f"{layer}.base_layer.bias", None)) is not None:
                state[f"{layer}.bias"] = bias
        for attention in self.attentions:
            attention.pack(state)
        return state


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return any(kind in name for kind in _KINDS)


def inject(clip: Any, config: Any, layers: Sequence[str]) -> None:
    """Put peft's layers around linear layers, in place; everything else is frozen afterwards.

    Args:
        clip: an open_clip model whose packed attentions are taken apart where they are meant.
        config: a `peft.LoraConfig`.
        layers: names of `nn.Linear` layers.

    Raises:
        ValueError: a row of a layer is zero, and DoRA divides by its length.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    for name in layers if config.use_dora else ():
        if not bool(clip.get_submodule(name).weight.detach().any(dim=1).all()):
            raise ValueError(f"adapters: {name} has a row of zeros, whose direction DoRA cannot turn: use lora there")
    config.target_modules = list(layers)
    inject_adapter_in_model(config, clip, NAME)
    config.target_modules = list(layers)  # peft shortens long lists to what their names have in common
    adapted = [name for name, module in clip.named_modules() if isinstance(module, LoraLayer)]
    assert adapted == list(layers), "peft adapts the layers that were named, and no other"


def hash_of_frozen(clip: nn.Module) -> str:
    """Of the names, shapes and bytes of everything in the model that does not train; xxh3, 128 bits."""
    trains = {name for name, parameter in clip.named_parameters() if parameter.requires_grad}
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(clip.state_dict().items()):
        if name not in trains:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return str(digest.hexdigest())
