"""What the token term accepts, and the agreement of the ranks on it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.objective.exchange import Exchange
from pipeline.objective.inputs import FEATURE_DTYPES, gather_facts


class TokenInputs(NamedTuple):
    """Of one rank: patches `[n, P, D]`, tokens `[n, L, D]`, which of them are words `[n, L]`, ids `[n]` or None."""

    image: Tensor
    text: Tensor
    mask: Tensor
    ids: Tensor | None


def find_token_fault(inputs: TokenInputs) -> str | None:
    """What is wrong with the inputs of this rank, in one sentence; None if nothing is."""
    image, text, mask, ids = inputs
    fits = image.ndim == text.ndim == 3 and image.shape[::2] == text.shape[::2]
    if not fits or 0 in image.shape or 0 in text.shape:
        return (
            "image_tokens must be [n, P, D] and text_tokens [n, L, D], entry i of one matching entry i of the other, "
            f"not {list(image.shape)} and {list(text.shape)}"
        )
    if image.dtype != text.dtype or image.dtype not in FEATURE_DTYPES:
        return f"image_tokens and text_tokens must share a floating-point dtype, not {image.dtype} and {text.dtype}"
    if mask.dtype != torch.bool or mask.shape != text.shape[:2]:
        return f"text_mask must be bool {list(text.shape[:2])}, not {mask.dtype} {list(mask.shape)}"
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != image.shape[:1]):
        return f"ids must be int64 [{image.shape[0]}], one per pair, not {ids.dtype} {list(ids.shape)}"
    return None


def agree_on_length(exchange: Exchange, inputs: TokenInputs) -> int:
    """The number of tokens of the longest captions of any rank.

    Raises:
        ValueError: on every rank, if the inputs of this or another rank are faulty, or do not fit together.
    """
    fault = find_token_fault(inputs)
    if fault is None and exchange.size == 1:
        return inputs.text.shape[1]
    facts: list[int] = []
    if fault is None:
        n, L, D = inputs.text.shape
        facts = [n, D, FEATURE_DTYPES.index(inputs.text.dtype), inputs.ids is not None, L]
    ranks = gather_facts(exchange, fault, facts, 5, "tokens", inputs.text.device)
    for column, what in enumerate(("number of pairs", "width", "dtype", "presence of ids")):
        values = [row[column] for row in ranks]
        if len(set(values)) > 1:
            raise ValueError(f"the {what} of the token term differs between the ranks: {values}")
    return max(row[-1] for row in ranks)
