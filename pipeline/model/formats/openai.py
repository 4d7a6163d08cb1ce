"""The layout of OpenAI's CLIP, shared by open_clip's plain models and Long-CLIP: dimensions from tensors alone."""

from __future__ import annotations

from typing import Any

import open_clip
import torch
from torch import Tensor

HEAD_WIDTH = 64
LONGCLIP_KEPT = 20  # positions that Long-CLIP reads from its frozen table
LONGCLIP_TABLE = "positional_embedding_res"
_ARCHIVE_KEYS = ("input_resolution", "context_length", "vocab_size")
_TEXT_PARTS = ("positional_embedding", "token_embedding.", "transformer.", "ln_final.", "text_projection")


def is_openai(state: dict[str, Tensor]) -> bool:
    """Whether the names are those of OpenAI's CLIP: the text tower's at the top, the image tower's under `visual`."""
    return "token_embedding.weight" in state and any(key.startswith("visual.") for key in state)


def from_openai(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of OpenAI's layout to those of `DualEncoder.encoder_state`; Long-CLIP's two tables become one.

    Long-CLIP adds positional_embedding to the first 20 positions and positional_embedding_res to the others
    (frameworks: beichenzbc/Long-CLIP, masks 1 and 2), so that one table says the same.
    """
    state = {k: v for k, v in state.items() if k not in _ARCHIVE_KEYS and not k.endswith("attn_mask")}
    if LONGCLIP_TABLE in state:
        trained = state.pop(LONGCLIP_TABLE)
        frozen = state["positional_embedding"]
        if frozen.shape != trained.shape:
            raise ValueError(
                f"a Long-CLIP checkpoint has two position tables of one shape, here {tuple(frozen.shape)} and "
                f"{tuple(trained.shape)}: is it damaged?"
            )
        state["positional_embedding"] = torch.cat([frozen[:LONGCLIP_KEPT], trained[LONGCLIP_KEPT:]])
    return {f"text.{k}" if k.startswith(_TEXT_PARTS) else k: v for k, v in state.items()}


def to_longclip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: OpenAI's names with Long-CLIP's two tables, each of them whole."""
    named = {key.removeprefix("text."): tensor for key, tensor in state.items()}
    named[LONGCLIP_TABLE] = named["positional_embedding"].clone()
    return named


def is_plain(state: dict[str, Tensor]) -> bool:
    """Whether both towers are open_clip's own, so that the tensors tell their dimensions."""
    vit = "visual.conv1.weight" in state and "visual.class_embedding" in state
    resnet = "visual.layer1.0.conv1.weight" in state and "visual.attnpool.positional_embedding" in state
    return (vit or resnet) and "text.positional_embedding" in state and "text.token_embedding.weight" in state


def infer_spec(state: dict[str, Tensor], quick_gelu: bool) -> dict[str, Any]:
    """The open_clip configuration of a plain model's state dict.

    Heads are width / 64, as everywhere but in open_clip's largest image towers: those are looked up in its registry.

    Raises:
        ValueError: a tensor that a CLIP has is missing; names it.
    """
    try:
        vision = _vision(state) if "visual.class_embedding" in state else _resnet(state)
        model_cfg = {"embed_dim": _embed_dim(state), "vision_cfg": vision, "text_cfg": _text(state)}
    except KeyError as error:
        raise ValueError(f"it has no tensor {error}, which every such CLIP has: is the file whole?") from error
    if quick_gelu:
        model_cfg["quick_gelu"] = True
    if "logit_bias" in state:
        model_cfg["init_logit_bias"] = float(state["logit_bias"])
    return {"model_cfg": model_cfg, "preprocess_cfg": _preprocess()}


def looks_like_openai_weights(state: dict[str, Tensor]) -> bool:
    """Whether the numbers were stored in half precision, as OpenAI's are even where a copy of them is float32."""
    table = state["text.token_embedding.weight"].float()
    return bool(torch.equal(table, table.half().float()))


def _embed_dim(state: dict[str, Tensor]) -> int:
    if "text.text_projection.weight" in state:
        return int(state["text.text_projection.weight"].shape[0])
    return int(state["text.text_projection"].shape[1])


def _vision(state: dict[str, Tensor]) -> dict[str, Any]:
    width, _, patch, _ = state["visual.conv1.weight"].shape
    places = state["visual.positional_embedding"].shape[0] - 1
    layers = _count(state, "visual.transformer.resblocks.", 3)
    hidden = state["visual.transformer.resblocks.0.mlp.c_fc.weight"].shape[0]
    config: dict[str, Any] = {
        "image_size": round(places**0.5) * patch,
        "layers": layers,
        "width": width,
        "patch_size": patch,
        "head_width": _head_width(width, layers),
        "mlp_ratio": hidden / width,
    }
    if "visual.transformer.resblocks.0.ls_1.gamma" in state:
        config["ls_init_value"] = 1.0
    if "visual.ln_pre.weight" not in state:
        config["no_ln_pre"] = True
    return config


def _resnet(state: dict[str, Tensor]) -> dict[str, Any]:
    places = state["visual.attnpool.positional_embedding"].shape[0] - 1
    return {
        "image_size": round(places**0.5) * 32,
        "layers": [_count(state, f"visual.layer{number}.", 2) for number in (1, 2, 3, 4)],
        "width": state["visual.layer1.0.conv1.weight"].shape[0],
        "patch_size": None,
        "head_width": HEAD_WIDTH,
    }


def _text(state: dict[str, Tensor]) -> dict[str, Any]:
    vocab_size, width = state["text.token_embedding.weight"].shape
    hidden = state["text.transformer.resblocks.0.mlp.c_fc.weight"].shape[0]
    config: dict[str, Any] = {
        "context_length": state["text.positional_embedding"].shape[0],
        "vocab_size": vocab_size,
        "width": width,
        "heads": max(1, width // HEAD_WIDTH),
        "layers": _count(state, "text.transformer.resblocks.", 3),
        "mlp_ratio": hidden / width,
    }
    if "text.text_projection.weight" in state:
        config["proj_bias"] = "text.text_projection.bias" in state
    return config


def _count(state: dict[str, Tensor], prefix: str, part: int) -> int:
    """Blocks below a prefix, by the number that stands in the names."""
    return len({key.split(".")[part] for key in state if key.startswith(prefix)})


def _head_width(width: int, layers: int) -> int:
    """Of open_clip's image tower of this width and depth, else 64, or the width where that is less."""
    for name in open_clip.list_models():
        vision = open_clip.get_model_config(name)["vision_cfg"]
        if (vision.get("width"), vision.get("layers")) == (width, layers) and "timm_model_name" not in vision:
            return int(vision.get("head_width", HEAD_WIDTH))
    return min(HEAD_WIDTH, width)


def _preprocess() -> dict[str, Any]:
    return {
        "mean": list(open_clip.OPENAI_DATASET_MEAN),
        "std": list(open_clip.OPENAI_DATASET_STD),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
