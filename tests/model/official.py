"""CLIP and Long-CLIP as papers and state dicts describe them, in plain tensor operations: what readers must equal."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

State = dict[str, Tensor]


def random_state(
    context: int = 77, width: int = 64, layers: int = 2, embed: int = 16, vocab: int = 49408, longclip: bool = False
) -> State:
    """A state dict in OpenAI's layout, 32 px and 16 px patches, heads 64 wide."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 0.2) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    state = {
        "positional_embedding": draw(context, width),
        "text_projection": draw(width, embed),
        "logit_scale": torch.tensor(3.0),
        "visual.class_embedding": draw(width),
        "visual.positional_embedding": draw(5, width),
        "visual.proj": draw(width, embed),
        "visual.conv1.weight": draw(width, 3, 16, 16, scale=0.05),
        "token_embedding.weight": draw(vocab, width),
    }
    for norm in ("visual.ln_pre", "visual.ln_post", "ln_final"):
        state |= {f"{norm}.weight": 1 + draw(width), f"{norm}.bias": draw(width)}
    for tower in ("visual.transformer", "transformer"):
        for number in range(layers):
            block = f"{tower}.resblocks.{number}"
            state |= {
                f"{block}.attn.in_proj_weight": draw(3 * width, width),
                f"{block}.attn.in_proj_bias": draw(3 * width),
                f"{block}.attn.out_proj.weight": draw(width, width),
                f"{block}.attn.out_proj.bias": draw(width),
                f"{block}.mlp.c_fc.weight": draw(4 * width, width),
                f"{block}.mlp.c_fc.bias": draw(4 * width),
                f"{block}.mlp.c_proj.weight": draw(width, 4 * width),
                f"{block}.mlp.c_proj.bias": draw(width),
            }
            for norm in ("ln_1", "ln_2"):
                state |= {f"{block}.{norm}.weight": 1 + draw(width), f"{block}.{norm}.bias": draw(width)}
    if longclip:
        state["positional_embedding_res"] = draw(context, width)
    return state


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def encode_image(state: State, pixels: Tensor, activation: Callable[[Tensor], Tensor] = quick_gelu) -> Tensor:
    """[B, 3, 32, 32] to [B, D], not normalised, in float64."""
    state = _double(state)
    patch = state["visual.conv1.weight"].shape[-1]
    B, side = len(pixels), pixels.shape[-1] // patch
    patches = pixels.double().reshape(B, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5).reshape(B, side**2, -1)
    x = patches @ state["visual.conv1.weight"].flatten(1).T
    x = torch.cat([state["visual.class_embedding"].expand(B, 1, -1), x], 1) + state["visual.positional_embedding"]
    x = _norm(state, "visual.ln_pre", x)
    x = _blocks(state, "visual.transformer", x, activation, causal=False)
    return _norm(state, "visual.ln_post", x[:, 0]) @ state["visual.proj"]


def encode_text(state: State, ids: Tensor, activation: Callable[[Tensor], Tensor] = quick_gelu) -> Tensor:
    """[B, L] to [B, D], not normalised, in float64. Two position tables are Long-CLIP's: masks of 20 and the rest."""
    state = _double(state)
    table = state["positional_embedding"]
    if "positional_embedding_res" in state:
        first = (torch.arange(len(table)) < 20).double()[:, None]
        table = table * first + state["positional_embedding_res"] * (1 - first)
    x = state["token_embedding.weight"][ids] + table[: ids.shape[1]]
    x = _blocks(state, "transformer", x, activation, causal=True)
    x = _norm(state, "ln_final", x)
    return x[torch.arange(len(ids)), ids.argmax(1)] @ state["text_projection"]


def _double(state: State) -> State:
    return {name: tensor.double() for name, tensor in state.items()}


def _norm(state: State, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
        + state[f"{name}.bias"]
    )


def _blocks(state: State, tower: str, x: Tensor, activation: Callable[[Tensor], Tensor], causal: bool) -> Tensor:
    layers = len(
        {name.split(".resblocks.")[1].split(".")[0] for name in state if name.startswith(f"{tower}.resblocks")}
    )
    B, L, width = x.shape
    for number in range(layers):
        block = f"{tower}.resblocks.{number}"
        y = _norm(state, f"{block}.ln_1", x) @ state[f"{block}.attn.in_proj_weight"].T
        q, k, v = (
            part.reshape(B, L, width // 64, 64).transpose(1, 2)
            for part in (y + state[f"{block}.attn.in_proj_bias"]).chunk(3, -1)
        )
        scores = q @ k.transpose(2, 3) / 8
        if causal:
            scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, L, width)
        x = x + y @ state[f"{block}.attn.out_proj.weight"].T + state[f"{block}.attn.out_proj.bias"]
        y = _norm(state, f"{block}.ln_2", x) @ state[f"{block}.mlp.c_fc.weight"].T + state[f"{block}.mlp.c_fc.bias"]
        x = x + activation(y) @ state[f"{block}.mlp.c_proj.weight"].T + state[f"{block}.mlp.c_proj.bias"]
    return x
