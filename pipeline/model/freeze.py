"""Which parameters train."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from pipeline.model.layers import places
from pipeline.sections import FreezeConfig


def set_trainable(model: nn.Module, patterns: Sequence[str]) -> tuple[int, int]:
    """Let only the parameters whose open_clip name matches one of the shell patterns train.

    Args:
        model: an open_clip model, e.g. `DualEncoder.clip`.
        patterns: e.g. `["visual.head.*", "text.proj.*", "logit_scale"]`; `["*"]` trains everything.

    Returns:
        The number of training and of frozen parameters (scalars, not tensors).

    Raises:
        ValueError: a pattern matches no parameter; shows the names one level below the towers.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            examples = sorted({".".join(name.split(".")[:3]) for name in names})
            raise ValueError(f"'{pattern}' matches no parameter; names begin with {', '.join(examples[:12])}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
    return _counts(model)


def freeze_layers(model: nn.Module, config: FreezeConfig) -> tuple[int, int]:
    """Freeze whole towers, or what comes before their layers and the first layers, on top of `set_trainable`.

    Args:
        model: an open_clip model.
        config: per tower `none`, `all`, or the number of layers; see `pipeline.model.layers` for what a layer is.

    Returns:
        As `set_trainable`.

    Raises:
        ValueError: a tower has fewer layers, or they are not known.
    """
    wanted = {"image": config.image, "text": config.text}
    for tower, prefix in (("image", "visual."), ("text", "text.")):
        if wanted[tower] == "all":
            for name, parameter in model.named_parameters():
                if name.startswith(prefix):
                    parameter.requires_grad_(False)
    if all(isinstance(value, str) for value in wanted.values()):
        return _counts(model)
    parameters = dict(model.named_parameters())
    for name, place in places(model).items():
        count = wanted[place.tower]
        if isinstance(count, str):
            continue
        if count > place.layers:
            raise ValueError(f"model.freeze.{place.tower} is {count}, but that tower has {place.layers} layers")
        if place.layer <= count:
            parameters[name].requires_grad_(False)
    return _counts(model)


def _counts(model: nn.Module) -> tuple[int, int]:
    """Scalars that train, and that are frozen."""
    sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
    return sum(size for trains, size in sizes if trains), sum(size for trains, size in sizes if not trains)
