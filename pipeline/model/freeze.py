"""Which parameters train."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


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
    training = frozen = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
        if parameter.requires_grad:
            training += parameter.numel()
        else:
            frozen += parameter.numel()
    return training, frozen
