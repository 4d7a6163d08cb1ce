"""Where in its tower a parameter stands: what freezing by depth and layer-wise learning rates go by."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from open_clip.hf_model import HFTextEncoder
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, VisionTransformer
from timm.models import group_parameters
from torch import nn

TOWERS = {"visual": "image", "text": "text"}


class Place(NamedTuple):
    """Depth of a parameter in its tower, `image` or `text`.

    layer: 0 for what comes before the layers (embeddings, stem), 1 to `layers` for a layer, `layers` + 1 for the head:
    final norms, pooling, projections.
    """

    tower: str
    layer: int
    layers: int


def places(clip: nn.Module) -> dict[str, Place]:
    """The place of every parameter of both towers, by its open_clip name; the temperature has none.

    A layer is a transformer block, one of the four stages of a ResNet, or a block as timm groups them.
    """
    found: dict[str, Place] = {}
    for name, tower in TOWERS.items():
        module: Any = getattr(clip, name)
        layer_of, layers = _layers(module)
        for parameter, _ in module.named_parameters():
            found[f"{name}.{parameter}"] = Place(tower, layer_of(parameter), layers)
    return found


def _layers(tower: Any) -> tuple[Callable[[str], int], int]:
    """Parameter name to layer, and how many layers."""
    if isinstance(tower, VisionTransformer | TextTransformer):
        first = ("conv1.", "class_embedding", "positional_embedding", "ln_pre.", "token_embedding.", "cls_emb")
        return _by_number(r"transformer\.resblocks\.(\d+)\.", first, tower)
    if isinstance(tower, ModifiedResNet):
        return lambda name: 0 if re.match(r"(conv|bn)\d", name) else int(re.sub(r"layer(\d).*|.*", r"\1", name) or 5), 4
    if isinstance(tower, TimmModel):
        groups = group_parameters(tower.trunk, tower.trunk.group_matcher(coarse=False))
        of = {f"trunk.{name}": layer for layer, names in groups.items() for name in names}
        last = max(groups)  # the trunk's own head, or its last block together with its final norm
        layers = last if any(re.search(r"\.\d+\.", name) for name in groups[last]) else last - 1
        return lambda name: of.get(name, layers + 1), layers
    if isinstance(tower, HFTextEncoder):
        return _by_number(r"transformer\.(?:\w+\.)*?(?:layers?|block|h)\.(\d+)\.", ("transformer.embed",), tower)
    raise ValueError(f"the layers of a {type(tower).__name__} are not known: freeze by model.trainable instead")


def _by_number(pattern: str, first: tuple[str, ...], tower: nn.Module) -> tuple[Callable[[str], int], int]:
    """For towers that number their blocks from 0."""
    numbers = {int(m[1]) for name, _ in tower.named_parameters() if (m := re.match(pattern, name))}
    layers = len(numbers)

    def layer_of(name: str) -> int:
        if (m := re.match(pattern, name)) is not None:
            return int(m[1]) + 1
        return 0 if name.startswith(first) or "embeddings" in name else layers + 1

    return layer_of, layers
