"""What the contrastive objectives accept, and the agreement of the ranks on it.

A collective over unequal shapes hangs or crashes far from its cause. So the ranks first exchange a few integers about
their inputs; then either all of them go on, or all of them raise a `ValueError` that names the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.objective.exchange import Exchange

FEATURE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Wanted:
    """Which gradients to compute. `text` is that of the whole group: its gradient takes a collective of all ranks."""

    image: bool
    text: bool
    scale: bool

    def __bool__(self) -> bool:
        return self.image or self.text or self.scale


def wanted_gradients(image: Tensor, text: Tensor, scale: Tensor) -> Wanted:
    """The gradients that autograd will ask this rank for: none under `torch.no_grad()`."""
    recording = torch.is_grad_enabled()
    return Wanted(*(recording and tensor.requires_grad for tensor in (image, text, scale)))


def find_fault(image: Tensor, text: Tensor, scale: Tensor, ids: Tensor | None) -> str | None:
    """What is wrong with the inputs of this rank, in one sentence; None if nothing is."""
    if image.ndim != 2 or image.shape != text.shape or 0 in image.shape:
        return (
            "image_features and text_features must both be [n, D] with row i of one matching row i of the other, "
            f"not {list(image.shape)} and {list(text.shape)}"
        )
    if image.dtype != text.dtype or image.dtype not in FEATURE_DTYPES:
        return (
            "image_features and text_features must share one dtype, float32, float64, bfloat16 or float16, "
            f"not {image.dtype} and {text.dtype}: cast them to the same"
        )
    if image.device != text.device:
        return f"image_features are on {image.device} but text_features on {text.device}: move them together"
    if scale.numel() != 1 or not scale.is_floating_point():
        return (
            "logit_scale must be one floating-point number (already exponentiated) of shape [] or [1], "
            f"not {list(scale.shape)} of {scale.dtype}"
        )
    if ids is None:
        return None
    if ids.dtype != torch.int64 or ids.shape != image.shape[:1]:
        return f"ids must be int64 of shape [{image.shape[0]}], one per pair, not {list(ids.shape)} of {ids.dtype}"
    if ids.device != image.device:
        return f"ids are on {ids.device} but the features on {image.device}: move them together"
    return None


def agree(exchange: Exchange, image: Tensor, text: Tensor, scale: Tensor, ids: Tensor | None, wanted: Wanted) -> Wanted:
    """Raise on every rank if the inputs of any rank cannot be used; return the gradients wanted by the group.

    Raises:
        ValueError: the inputs of this or another rank are faulty, or those of the ranks do not fit together.
    """
    fault = find_fault(image, text, scale, ids)
    if exchange.size == 1:
        if fault:
            raise ValueError(fault)
        return wanted
    local = [0] * 6
    if fault is None:
        local = [1, *image.shape, FEATURE_DTYPES.index(image.dtype), ids is not None, wanted.text]
    ranks = exchange.gather(torch.tensor([local], dtype=torch.int64, device=image.device)).tolist()
    if fault:
        raise ValueError(fault)
    faulty = [rank for rank, row in enumerate(ranks) if not row[0]]
    if faulty:
        raise ValueError(f"rank(s) {faulty} got inputs that cannot be used; the error there says why")
    sizes = [row[1] for row in ranks]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"every rank must bring equally many pairs, but ranks 0 to {len(sizes) - 1} bring {sizes}: "
            "drop the last incomplete batch, or pad it"
        )
    for column, what in ((2, "embedding width"), (3, "feature dtype"), (4, "presence of ids")):
        values = [row[column] for row in ranks]
        if len(set(values)) > 1:
            names = [str(FEATURE_DTYPES[value]) for value in values] if column == 3 else values
            raise ValueError(f"the {what} differs between the ranks: {names}")
    return Wanted(wanted.image, any(row[5] for row in ranks), wanted.scale)
