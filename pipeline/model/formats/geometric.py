"""Weights in polar form, as the fine-tunes of GmP-CLIP keep those of their MLPs (geometric parametrisation)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

_LENGTHS, _DIRECTIONS = ".r", ".theta"


def is_geometric(state: dict[str, Tensor]) -> bool:
    """Whether some weights are stored as lengths `r` and directions `theta` of their rows."""
    return any(name.endswith(_DIRECTIONS) for name in state)


def merge_geometric(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights again: row i of `weight` is r_i theta_i / ||theta_i||, which is what such a layer computes with.

    Args:
        state: for some layers `theta` [out, in] and `r` [out, 1] instead of `weight`.

    Raises:
        ValueError: one of the two is missing, or they are not of one layer; names it.
    """
    merged = {name: tensor for name, tensor in state.items() if not name.endswith((_LENGTHS, _DIRECTIONS))}
    layers = {name.rpartition(".")[0] for name in state if name.endswith((_LENGTHS, _DIRECTIONS))}
    for layer in sorted(layers):
        lengths, directions = state.get(layer + _LENGTHS), state.get(layer + _DIRECTIONS)
        if lengths is None or directions is None or directions.ndim != 2 or lengths.numel() != len(directions):
            shapes = [None if t is None else list(t.shape) for t in (lengths, directions)]
            raise ValueError(
                f"{layer} is in geometric parametrisation, which has r [n, 1] and theta [n, m], here {shapes[0]} and "
                f"{shapes[1]}: is the file whole?"
            )
        merged[f"{layer}.weight"] = lengths.reshape(-1, 1) * F.normalize(directions, dim=1)
    return merged
