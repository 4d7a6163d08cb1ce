"""Objectives by the names that recipes use."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from pipeline.objective import rivals
from pipeline.objective.base import Objective
from pipeline.objective.hn_clip import HNClipLoss
from pipeline.objective.margin_loss import InfoNCELoss
from pipeline.objective.margins import CentredHNClipLoss, FrozenHNClipLoss, ImageHNClipLoss, UniformMarginLoss

OBJECTIVES: dict[str, type[Objective]] = {
    "infonce": InfoNCELoss,
    "hn": HNClipLoss,
    "hn-frozen": FrozenHNClipLoss,
    "hn-centred": CentredHNClipLoss,
    "hn-image": ImageHNClipLoss,
    "uniform": UniformMarginLoss,
    "hn-nce": rivals.HardNegativeNCELoss,
    "hcl": rivals.HclLoss,
    "debiased": rivals.DebiasedLoss,
    "gist": rivals.GistLoss,
    "softclip": rivals.SoftClipLoss,
    "cwcl": rivals.CwclLoss,
    "vse": rivals.VseLoss,
    "vse-adaptive": rivals.AdaptiveVseLoss,
    "arm": rivals.AdaptiveRelevanceMarginLoss,
    "siglip": rivals.SigLipLoss,
    "siglip-hn": rivals.SigLipHNLoss,
}


def make_objective(name: str, **params: Any) -> Objective:
    """Build an objective over the default process group.

    Args:
        name: a key of `OBJECTIVES`.
        **params: its parameters; those left out keep their defaults.

    Raises:
        ValueError: no objective has that name, or it has no such parameter. The message names the nearest.
    """
    if name not in OBJECTIVES:
        raise ValueError(unknown_name("objective", name, list(OBJECTIVES)))
    accepted = parameters(name)
    for param in params:
        if param not in accepted:
            raise ValueError(unknown_name(f"parameter of the objective {name!r}", param, accepted))
    return OBJECTIVES[name](**params)


def parameters(name: str) -> list[str]:
    """The parameters that an objective takes in a recipe, its own first. A process group is none."""
    found: dict[str, None] = {}
    constructors = [vars(cls)["__init__"] for cls in OBJECTIVES[name].__mro__ if "__init__" in vars(cls)]
    for constructor in constructors:
        signature = inspect.signature(constructor)
        found.update(dict.fromkeys(p.name for p in signature.parameters.values() if p.name not in ("self", "group")))
        if "options" not in found:
            break
        del found["options"]  # whatever the constructor of the next class up takes
    return list(found)


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """What an error says of a word that is not among the known ones."""
    if not known:
        return f"unknown {kind}: {name!r}. It has none"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"unknown {kind}: {name!r}. Nearest: {nearest[0]!r}; all: {', '.join(known)}"
