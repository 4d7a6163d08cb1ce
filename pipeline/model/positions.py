"""The position table of a text tower: stretched to longer captions, or frozen in its first rows."""

from __future__ import annotations

from typing import Any

import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

KEPT = 20  # Long-CLIP's own number of positions that keep what they were trained to be


def stretch_table(table: Tensor, length: int, keep: int = KEPT) -> Tensor:
    """A position table [n, D] for longer captions, [length, D], by the rule of Long-CLIP (Zhang et al. 2024).

    With f the smallest factor whose table, of keep + f (n - keep) rows, reaches the length:

        new[i] = old[i]                                                       i < keep
        new[keep + f i + r] = ((f - r) old[keep + i] + r old[keep + i + 1]) / f     r = 0 .. f - 1
        the last f rows: old[n - 1] + r/f (old[n - 1] - old[n - 2])

    77 positions with 20 kept and f = 4 give Long-CLIP's 248. Other lengths are the first rows of the next table.

    Raises:
        ValueError: nothing is left to interpolate, or the table is longer already.
    """
    n = table.shape[0]
    if not 0 <= keep <= n - 2:
        raise ValueError(
            f"model.keep_positions is {keep}, but of {n} positions at least two must be left to interpolate"
        )
    if length < n:
        raise ValueError(f"a table of {n} positions cannot be stretched to {length}")
    rest = table[keep:].double()
    factor = -(-(length - keep) // (n - keep))
    ahead = torch.cat([rest[1:], 2 * rest[-1:] - rest[-2:-1]])  # beyond the end, the last step goes on
    share = torch.arange(factor, dtype=torch.float64, device=table.device)[None, :, None] / factor
    rows = (1 - share) * rest[:, None] + share * ahead[:, None]
    return torch.cat([table[:keep].double(), rows.flatten(0, 1)])[:length].to(table.dtype)


def stretch(text: Any, length: int, keep: int = KEPT) -> None:
    """Give a text tower a longer context, its weights otherwise as they are.

    A Hugging Face tower has more positions than open_clip gives it tokens: it reads as many as those without a change,
    and its table is not stretched, because its own configuration says how long it is.

    Raises:
        ValueError: the tower has no table of its own to stretch, or is a Hugging Face one with fewer positions.
    """
    if isinstance(text, HFTextEncoder):
        _check_positions(text, length)
        return
    if not isinstance(text, TextTransformer):
        raise ValueError(f"a {type(text).__name__} has no position table of its own")
    if text.cls_emb is not None:
        raise ValueError("its class token has the last position of the table")
    with torch.no_grad():
        text.positional_embedding = nn.Parameter(stretch_table(text.positional_embedding, length, keep))
    text.num_pos = text.context_length = length
    if text.attn_mask is not None:
        text.attn_mask = text.build_causal_mask()


def _check_positions(text: HFTextEncoder, length: int) -> None:
    if hasattr(text.config, "relative_attention_num_buckets") and position_table(text) is None:
        return  # T5's positions are distances, without an end
    embeddings = getattr(text.transformer, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    if not isinstance(positions, nn.Embedding):
        raise ValueError(f"its Hugging Face {text.config.model_type} has no position table that is known here")
    used_before = 0 if positions.padding_idx is None else positions.padding_idx + 1  # RoBERTa counts from there
    if length > positions.num_embeddings - used_before:
        raise ValueError(
            f"its Hugging Face {text.config.model_type} has {positions.num_embeddings - used_before} positions, and "
            "only open_clip's own towers are stretched; lower model.context_length, or use such a tower"
        )


def position_table(text: Any) -> nn.Parameter | None:
    """The position table of an open_clip or Hugging Face text tower, if it has one."""
    if isinstance(text, TextTransformer):
        return text.positional_embedding
    embeddings = getattr(getattr(text, "transformer", None), "embeddings", None)
    table = getattr(getattr(embeddings, "position_embeddings", None), "weight", None)
    return table if isinstance(table, nn.Parameter) else None


def freeze_positions(text: Any, count: int) -> None:
    """Keep the first rows of the position table as they are while the others train, as in Long-CLIP.

    The rows' gradient is exactly zero, so that AdamW's moments stay zero and its step is zero; weight decay, which acts
    without a gradient, is left out for the whole table (`decays`). A hook on the parameter runs before ZeRO reduces the
    gradient, at every stage.

    Raises:
        ValueError: the tower has no position table of that length, or none of it trains.
    """
    table = position_table(text)
    if table is None or not 0 < count < table.shape[0]:
        rows = "no position table" if table is None else f"{table.shape[0]} positions"
        raise ValueError(f"model.freeze_positions is {count}, but this model's text tower has {rows}")

    if not table.requires_grad:
        raise ValueError(
            f"model.freeze_positions is {count}, but the whole table is frozen: leave it out, or let the table train "
            "(model.freeze, model.trainable)"
        )

    def mask(grad: Tensor) -> Tensor:
        kept = grad.clone()
        kept[:count] = 0
        return kept

    table.register_hook(mask)
    table.frozen_rows = count  # type: ignore[attr-defined]


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, but not to a table of which some rows are frozen."""
    return parameter.ndim > 1 and not hasattr(parameter, "frozen_rows")
