"""What the contrastive objectives accept, and the agreement of the ranks on it.

A collective over unequal shapes hangs or crashes far from its cause. So the ranks first exchange a few integers about
their inputs; then either all of them go on, or all of them raise a `ValueError` that names the sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.objective.exchange import Exchange

FEATURE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """What an objective is called with on one rank.

    Attributes:
        image: `[n, D]`, normalised.
        text: `[n, D]`, normalised.
        scale: `[]` or `[1]`, the inverse temperature.
        ids: `[n]` int64, or None; pairs of the global batch with equal id are no negatives of each other.
        caption_keys: `[n]` int64, or None; the same for captions.
        frozen_text_features: `[n, K]`, or None: the captions by another encoder.
        needs: which of the last two the objective needs; the others it does not take.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    ids: Tensor | None = None
    caption_keys: Tensor | None = None
    frozen_text_features: Tensor | None = None
    needs: tuple[str, ...] = ()

    @property
    def keys(self) -> list[Tensor]:
        """Whatever tells pairs that are no negatives of each other."""
        return [keys for keys in (self.ids, self.caption_keys) if keys is not None]


class Wanted(NamedTuple):
    """Which gradients to compute."""

    image: bool
    text: bool
    scale: bool

    @property
    def any(self) -> bool:
        """Whether there is a gradient to compute at all."""
        return self.image or self.text or self.scale


def wanted_gradients(inputs: Inputs) -> Wanted:
    """The gradients that autograd will ask this rank for: none under `torch.no_grad()`."""
    recording = torch.is_grad_enabled()
    return Wanted(*(recording and tensor.requires_grad for tensor in inputs[:3]))


def as_scale(logit_scale: Tensor | float) -> Tensor:
    """The scale as a tensor."""
    if isinstance(logit_scale, Tensor):
        return logit_scale
    return torch.tensor(float(logit_scale), dtype=torch.float64)


def find_fault(inputs: Inputs) -> str | None:
    """What is wrong with the inputs of this rank, in one sentence; None if nothing is."""
    image, text, scale, frozen = *inputs[:3], inputs.frozen_text_features
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
    for name in ("caption_keys", "frozen_text_features"):
        given = getattr(inputs, name) is not None
        if name in inputs.needs and not given:
            return f"this objective needs {name}: call it with {name}=..."
        if name not in inputs.needs and given:
            hint = ", or set equal_captions=True to use them" if name == "caption_keys" else ""
            return f"this objective does not use {name}: leave them out{hint}"
    for name, keys in (("ids", inputs.ids), ("caption_keys", inputs.caption_keys)):
        if keys is None:
            continue
        if keys.dtype != torch.int64 or keys.shape != image.shape[:1]:
            shape = list(keys.shape)
            return f"{name} must be int64 of shape [{image.shape[0]}], one per pair, not {shape} of {keys.dtype}"
        if keys.device != image.device:
            return f"{name} are on {keys.device} but the features on {image.device}: move them together"
    if frozen is None:
        return None
    if frozen.ndim != 2 or frozen.shape[0] != image.shape[0] or not frozen.is_floating_point():
        return (
            f"frozen_text_features must be [{image.shape[0]}, D] floating-point, row i for caption i, "
            f"not {list(frozen.shape)} of {frozen.dtype}"
        )
    if frozen.device != image.device:
        return f"frozen_text_features are on {frozen.device} but the features on {image.device}: move them together"
    return None


def agree(exchange: Exchange, inputs: Inputs, flag: bool = False) -> bool:
    """Raise on every rank if the inputs of any rank cannot be used; return whether `flag` is set on any.

    Raises:
        ValueError: the inputs of this or another rank are faulty, or those of the ranks do not fit together.
    """
    fault = find_fault(inputs)
    if exchange.size == 1:
        if fault:
            raise ValueError(fault)
        return flag
    facts: list[int] = []
    if fault is None:
        dtype = FEATURE_DTYPES.index(inputs.image.dtype)
        frozen = inputs.frozen_text_features
        frozen_width = 0 if frozen is None else frozen.shape[1]
        presence = [inputs.ids is not None, inputs.caption_keys is not None]
        facts = [*inputs.image.shape, dtype, *presence, frozen_width, flag]
    ranks = gather_facts(exchange, fault, facts, 7, "inputs", inputs.image.device)
    sizes = [row[0] for row in ranks]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"every rank must bring equally many pairs, but ranks 0 to {len(sizes) - 1} bring {sizes}: "
            "drop the last incomplete batch, or pad it"
        )
    things = ("embedding width", "feature dtype", "presence of ids", "presence of caption_keys", "frozen text width")
    for column, what in enumerate(things, start=1):
        values = [row[column] for row in ranks]
        if len(set(values)) > 1:
            names = [str(FEATURE_DTYPES[value]) for value in values] if what == "feature dtype" else values
            raise ValueError(f"the {what} differs between the ranks: {names}")
    return any(row[-1] for row in ranks)


def gather_facts(
    exchange: Exchange, fault: str | None, facts: list[int], count: int, what: str, device: torch.device
) -> list[list[int]]:
    """What every rank says of its inputs, in rank order, once no rank has found a fault in its own.

    Args:
        exchange: the ranks.
        fault: what is wrong with the inputs of this rank.
        facts: `count` numbers; not looked at with a fault.
        what: a word for the inputs, in the error.
        device: where collectives run.

    Raises:
        ValueError: on every rank, if there is a fault on any.
    """
    row = [0] * (1 + count) if fault else [1, *facts]
    ranks = exchange.gather(torch.tensor([row], dtype=torch.int64, device=device)).tolist()
    if fault:
        raise ValueError(fault)
    faulty = [rank for rank, (sound, *_) in enumerate(ranks) if not sound]
    if faulty:
        raise ValueError(f"rank(s) {faulty} got {what} that cannot be used; the error there says why")
    return [facts for _, *facts in ranks]
