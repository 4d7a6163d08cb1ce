"""AdamW's parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math
from collections import defaultdict
from fnmatch import fnmatchcase

import torch
from torch import nn

from pipeline.model.dual_encoder import named_training
from pipeline.model.layers import places
from pipeline.model.positions import decays
from pipeline.training_sections import OptimizerConfig, ScheduleConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig, framework: nn.Module | None = None) -> torch.optim.AdamW:
    """AdamW over the parameters that train.

    Biases, norms, the temperature and every other parameter of at most one dimension are not decayed. Each group
    keeps its peak learning rate as `peak_lr`: lr layer_decay^(layers + 1 - layer), with the layers of the parameter's
    tower counted from 0, the embeddings, to layers + 1, its head (as in BEiT; `pipeline.model.layers`).

    Args:
        model: an open_clip model with `requires_grad` set.
        config: `lr_overrides` maps shell patterns of parameter names to learning rates, without any decay by layer; the
            first match counts.
        framework: its parameters train as well, and are called `framework.NAME`.

    Raises:
        ValueError: nothing trains, or a pattern matches nothing that trains.
    """
    named = list(named_training(model, framework))
    if not named:
        raise ValueError("no parameter trains; see model.trainable")
    for pattern in config.lr_overrides:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"optimizer.lr_overrides: '{pattern}' matches no parameter that trains")
    heights = {} if config.layer_decay == 1 else {n: p.layers + 1 - p.layer for n, p in places(model).items()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        own = config.lr * config.layer_decay ** heights.get(name, 0)
        lr = next((v for p, v in config.lr_overrides.items() if fnmatchcase(name, p)), own)
        groups[(lr, config.weight_decay if decays(parameter) else 0.0)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": lr, "peak_lr": lr, "weight_decay": decay}
            for (lr, decay), parameters in groups.items()
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # One pass over the memory. ZeRO's partitions are flat, of hundreds of megabytes: the other forms go over them
        # nine times, and make room for a new one each step.
        fused=True,
    )


def lr_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The share of the peak learning rate at a step (counted from 0): linear warm-up, then half a cosine to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
