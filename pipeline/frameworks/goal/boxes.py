"""Boxes and patches: which patches lie in a box, which boxes to try, and the picture cut out of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import roi_align

from pipeline.model.last_layer import image_last_layer


class PatchGrid(NamedTuple):
    """Patches as a tower lays them out: their number, and height and width of one in pixels of its input.

    They start at the top left. Where the picture is no multiple of a patch, its last pixels are in none.
    """

    rows: int
    columns: int
    height: float
    width: float

    @classmethod
    def of(cls, tower: Any, size: int) -> PatchGrid:
        """That of an image tower for pictures of `size` x `size`, found by looking at one."""
        mode, weight = tower.training, next(tower.parameters())
        tower.eval()
        with torch.no_grad():
            rows, columns = image_last_layer(tower, weight.new_zeros(1, 3, size, size)).grid
        tower.train(mode)
        embed = getattr(getattr(tower, "trunk", None), "patch_embed", None)
        height, width = getattr(tower, "patch_size", None) or getattr(embed, "patch_size", None) or (0, 0)
        if not (height and width and (size // height, size // width) == (rows, columns)):
            height, width = size / rows, size / columns  # a CNN: a place of its last map stands for its share
        return cls(rows, columns, float(height), float(width))


def patches_in(box: Sequence[float], grid: PatchGrid) -> NDArray[np.bool_]:
    """bool [rows x columns], row by row: the patches whose centre lies in a box of the tower's input.

    A box that is too thin to hold a centre, across or down, takes the patch that holds its own centre. A box that
    shares nothing with the patches takes none.
    """
    left, top, right, bottom = box
    down = _between(top, bottom, grid.rows, grid.height)
    across = _between(left, right, grid.columns, grid.width)
    return (down[:, None] & across[None, :]).reshape(-1)


def _between(low: float, high: float, count: int, side: float) -> NDArray[np.bool_]:
    low, high = max(low, 0.0), min(high, count * side)
    centres = (np.arange(count) + 0.5) * side
    inside: NDArray[np.bool_] = (centres >= low) & (centres < high)
    if low < high and not inside.any():
        inside[min(int((low + high) / 2 / side), count - 1)] = True
    return inside


def candidates(grid: PatchGrid, scales: Sequence[float]) -> Tensor:
    """Boxes to try, int64 [N, 4]: left, top, right, bottom in patches. Square in shares of the picture.

    For each scale, a share of the picture's side, boxes half a side apart that reach all edges. The whole picture is
    none of them.

    Raises:
        ValueError: the grid or the scales leave none.
    """
    found: dict[tuple[int, int, int, int], None] = {}
    for scale in scales:
        rows, columns = (max(1, round(scale * n)) for n in (grid.rows, grid.columns))
        if (rows, columns) == (grid.rows, grid.columns):
            continue
        for top in _starts(rows, grid.rows):
            for left in _starts(columns, grid.columns):
                found[left, top, left + columns, top + rows] = None
    if not found:
        raise ValueError(
            f"no box can be proposed on {grid.rows} x {grid.columns} patches at scales {tuple(scales)}: give smaller "
            "ones in framework.scales, or train a tower with more patches"
        )
    return torch.tensor(list(found))


def _starts(side: int, count: int) -> list[int]:
    return sorted({*range(0, count - side + 1, max(1, side // 2)), count - side})


def members(boxes: Tensor, grid: PatchGrid) -> Tensor:
    """bool [N, P]: which patches, row by row, lie in boxes [N, 4] given in patches."""
    left, top, right, bottom = boxes.unsqueeze(-1).unbind(1)
    row, column = torch.arange(grid.rows), torch.arange(grid.columns)
    down, across = (top <= row) & (row < bottom), (left <= column) & (column < right)
    return (down[:, :, None] & across[:, None, :]).flatten(1)


def mean_of(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Means of some of the tokens, summed in float32 at least; zeros where none is chosen.

    Args:
        tokens: [B, P, W].
        chosen: bool [B, N, P], or [N, P] for the same choices in all of B.

    Returns:
        [B, N, W].
    """
    wide = torch.promote_types(tokens.dtype, torch.float32)
    weight = chosen.to(wide)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
    return (weight @ tokens.to(wide)).to(tokens.dtype)


def cut_out(pictures: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Boxes out of pictures, resized with bilinear interpolation, antialiased.

    Args:
        pictures: float32 [B, 3, H, W]. boxes: float32 [B, 4], left, top, right, bottom in shares of a side.

    Returns:
        float32 [B, 3, size, size].
    """
    height, width = pictures.shape[-2:]
    edges = boxes * boxes.new_tensor([width, height, width, height])
    number = torch.arange(len(boxes), device=boxes.device, dtype=boxes.dtype)
    cut: Tensor = roi_align(pictures, torch.cat([number[:, None], edges], dim=1), size, aligned=True)
    return cut
