"""Objectives by the names that recipes use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from pipeline.objective.hn_clip import DEFAULT_MEMORY_BUDGET, HNClipLoss


def infonce(group: dist.ProcessGroup | None = None, memory_budget: int = DEFAULT_MEMORY_BUDGET) -> HNClipLoss:
    """CLIP's own loss: no margin. Parameters as in `HNClipLoss`."""
    return HNClipLoss(gamma=0.0, group=group, memory_budget=memory_budget)


OBJECTIVES: dict[str, Callable[..., nn.Module]] = {"infonce": infonce, "hn": HNClipLoss}


def make_objective(name: str, **params: Any) -> nn.Module:
    """Build an objective.

    Args:
        name: `infonce` or `hn`.
        **params: its parameters; those left out keep their defaults.

    Raises:
        ValueError: no objective has that name, or it has no such parameter. The message names the nearest.
    """
    if name not in OBJECTIVES:
        raise ValueError(_unknown("objective", name, list(OBJECTIVES)))
    accepted = list(inspect.signature(OBJECTIVES[name]).parameters)
    for param in params:
        if param not in accepted:
            raise ValueError(_unknown(f"parameter of the objective {name!r}", param, accepted))
    return OBJECTIVES[name](**params)


def _unknown(kind: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"unknown {kind}: {name!r}. Nearest: {nearest[0]!r}; all: {', '.join(known)}"
