"""Packed attention, taken apart into linear layers for adapters and packed again.

open_clip's blocks keep the projections of queries, keys and values in one matrix that no layer multiplies by, so that
an adapter has nothing to stand on. Taken apart, an attention is the same module with the same other parts; only its
forward differs, and `in_proj_weight`, `in_proj_bias` are `q_proj`, `k_proj`, `v_proj`. Rows 0 to W of the packed matrix
are those of the queries, then come keys and values; poolers, whose keys have another width, keep three matrices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from open_clip.transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

PARTS = ("q_proj", "k_proj", "v_proj")


class Packed(NamedTuple):
    """An attention that is taken apart: its name in the model, and whether its matrices were packed into one."""

    name: str
    joined: bool

    def weight_of(self, part: str) -> str:
        """The packed parameter that a part's weight comes from."""
        return f"{self.name}.in_proj_weight" if self.joined else f"{self.name}.{part}_weight"

    def pack(self, state: dict[str, Tensor]) -> None:
        """Give the tensors of the parts their packed names and shapes, in place."""
        weights = {part: state.pop(f"{self.name}.{part}.weight") for part in PARTS}
        if self.joined:
            state[f"{self.name}.in_proj_weight"] = torch.cat(list(weights.values()))
        else:
            state.update({self.weight_of(part): weight for part, weight in weights.items()})
        if f"{self.name}.q_proj.bias" in state:
            state[f"{self.name}.in_proj_bias"] = torch.cat([state.pop(f"{self.name}.{part}.bias") for part in PARTS])


def split_attentions(clip: nn.Module) -> list[Packed]:
    """Take apart every packed attention of an open_clip model, in place.

    Raises:
        ValueError: an attention is of a kind that open_clip's own models do not train.
    """
    return [_split(name, module) for name, module in clip.named_modules() if type(module) in _SPLIT]


def pack_attention(clip: nn.Module, packed: Packed) -> None:
    """Make an attention what it was before `split_attentions`, with the weights that its parts have now."""
    module: Any = clip.get_submodule(packed.name)
    trains, biases_train = (bool(p is not None and p.requires_grad) for p in (module.q_proj.weight, module.q_proj.bias))
    state = {f"{packed.name}.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    packed.pack(state)
    for part in PARTS:
        delattr(module, part)
    for name in ("in_proj_weight", *(f"{part}_weight" for part in PARTS), "in_proj_bias"):
        if (tensor := state.get(f"{packed.name}.{name}")) is not None:
            module.register_parameter(name, nn.Parameter(tensor, biases_train if name == "in_proj_bias" else trains))
    module.__class__ = type(module).__base__


def _split(name: str, module: Any) -> Packed:
    if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
        raise ValueError(f"adapters: {name} adds keys and values of its own, which cannot be taken apart")
    if getattr(module, "logit_scale", None) is not None:
        raise ValueError(f"adapters: {name} scales cosines (scale_cosine_attn), which cannot be taken apart")
    joined = module.in_proj_weight is not None
    weights = module.in_proj_weight.chunk(3) if joined else [getattr(module, f"{part}_weight") for part in PARTS]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    for part, weight, bias in zip(PARTS, weights, biases, strict=True):
        # On `meta` no random numbers are drawn.
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        setattr(module, part, layer)
        if not joined:
            module.register_parameter(f"{part}_weight", None)
    module.register_parameter("in_proj_weight", None)
    module.register_parameter("in_proj_bias", None)
    module.__class__ = _SPLIT[type(module)]
    return Packed(name, joined)


def _heads(projected: Tensor, num_heads: int) -> Tensor:
    """[B, L, W] to [B, heads, L, W / heads]."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as scaled_dot_product_attention adds it: [L, S] for all heads, or [B, heads, L, S]."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:  # True is left out
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    if mask.ndim == 3:
        mask = mask.view(like.shape[0], like.shape[1], *mask.shape[1:])
    return mask.to(like.dtype)


class _SplitMultiheadAttention(nn.MultiheadAttention):
    """torch's attention over three layers. Gives no attention weights; open_clip asks for none."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        assert not need_weights
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q = _heads(self.q_proj(query), self.num_heads)
        k = _heads(self.k_proj(key), self.num_heads)
        v = _heads(self.v_proj(value), self.num_heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_additive(attn_mask, q), dropout_p=dropout)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), None


class _SplitAttention(Attention):
    """open_clip's own attention, with norms of queries and keys and scales of heads, over three layers."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (_heads(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.ln_q(q), self.ln_k(k)
        dropout = self.attn_drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_additive(attn_mask, q), dropout_p=dropout)
        if self.head_scale is not None:
            mixed = mixed * self.head_scale
        out: Tensor = self.out_drop(self.out_proj(self.ln_inner(mixed.transpose(1, 2).flatten(2))))
        return out


_SPLIT: dict[type[nn.Module], Any] = {nn.MultiheadAttention: _SplitMultiheadAttention, Attention: _SplitAttention}
