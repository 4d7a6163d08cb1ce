"""Hugging Face's CLIPModel: its names and configuration, both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.model.formats.openai import HEAD_WIDTH, infer_spec

_LEGACY_EOS = 2  # transformers' sign for "the largest id", from before the configuration knew the real one
_DEFAULT_EPS = 1e-5

# Theirs to ours, for one block of either tower; query, key and value are one matrix here.
_BLOCK = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_TOP = {
    "logit_scale": "logit_scale",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
    "text_model.embeddings.token_embedding.weight": "text.token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "text.positional_embedding",
    "text_model.final_layer_norm.weight": "text.ln_final.weight",
    "text_model.final_layer_norm.bias": "text.ln_final.bias",
}
_TRANSPOSED = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text.text_projection"}
_TOWERS = {"vision_model.encoder.layers.": "visual", "text_model.encoder.layers.": "text"}


def is_hugging_face(state: dict[str, Tensor]) -> bool:
    """Whether some of the names are those of transformers' CLIP or its relatives."""
    return any(key.startswith(("text_model.", "vision_model.")) for key in state)


def from_hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """CLIPModel's names to those of `DualEncoder.encoder_state`.

    Raises:
        ValueError: the weights are half a CLIP, or those of a relative (SigLIP).
    """
    _check_whole(state)
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key in _TOP:
            found[_TOP[key]] = tensor
        elif key in _TRANSPOSED:
            found[_TRANSPOSED[key]] = tensor.T.contiguous()
        elif not key.endswith("position_ids") and not any(f".{part}_proj." in key for part in "qkv"):
            found[_block_name(key)] = tensor
    for key in [key for key in state if ".q_proj." in key]:
        parts = [state[key.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        own = _block_name(key.replace("self_attn.q_proj", "self_attn.out_proj"))
        block, _, kind = own.rpartition(".out_proj.")
        found[f"{block}.in_proj_{kind}"] = torch.cat(parts)
    return found


def to_hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `from_hugging_face`."""
    top = {ours: theirs for theirs, ours in _TOP.items()}
    transposed = {ours: theirs for theirs, ours in _TRANSPOSED.items()}
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key in top:
            found[top[key]] = tensor.contiguous()
        elif key in transposed:
            found[transposed[key]] = tensor.T.contiguous()
        else:
            found.update(_their_block(key, tensor))
    return found


def spec_of(state: dict[str, Tensor], config: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """The open_clip configuration of a CLIPModel (its state in our names), and whether the activation was stated.

    Args:
        state: as `from_hugging_face` gives it.
        config: its config.json. Without one heads are width / 64 and the activation QuickGELU, theirs too.

    Raises:
        ValueError: the configuration is that of another kind of model, or of one that open_clip cannot express.
    """
    if config is None:
        return infer_spec(state, quick_gelu=True), False
    if config.get("model_type") != "clip":
        raise ValueError(f"its config.json is of a '{config.get('model_type')}' model, expected 'clip'")
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    activations = {part.get("hidden_act", "quick_gelu") for part in (vision, text)}
    if len(activations) != 1 or not activations <= {"quick_gelu", "gelu"}:
        raise ValueError(f"open_clip has no model with the activations {', '.join(sorted(activations))}")
    spec = infer_spec(state, quick_gelu=activations == {"quick_gelu"})
    model = spec["model_cfg"]
    model["vision_cfg"]["head_width"] = model["vision_cfg"]["width"] // int(vision.get("num_attention_heads", 12))
    model["text_cfg"]["heads"] = int(text.get("num_attention_heads", 8))
    for own, theirs in ((model["vision_cfg"], vision), (model["text_cfg"], text)):
        if (eps := float(theirs.get("layer_norm_eps", _DEFAULT_EPS))) != _DEFAULT_EPS:
            own["norm_kwargs"] = {"eps": eps}
    eos = int(text.get("eos_token_id", 49407))
    if eos not in (
        _LEGACY_EOS,
        model["text_cfg"]["vocab_size"] - 1,
    ):  # tokens were added behind the end
        model["text_cfg"].update(pool_type="eos", eos_id=eos)
    return spec, True


def config_of(spec: dict[str, Any], context_length: int) -> dict[str, Any]:
    """The config.json of a CLIPModel like an open_clip model that `hf_refusal` accepts."""
    model = spec["model_cfg"]
    vision, text, embed_dim = model["vision_cfg"], model["text_cfg"], model["embed_dim"]
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    end = text.get("eos_id", 2) if text.get("pool_type") == "eos" else text.get("vocab_size", 49408) - 1
    size = vision.get("image_size", 224)

    def tower(own: dict[str, Any], heads: int, ratio: float, **more: Any) -> dict[str, Any]:
        return {
            "hidden_size": own["width"],
            "intermediate_size": int(own["width"] * ratio),
            "num_hidden_layers": own["layers"],
            "num_attention_heads": heads,
            "hidden_act": activation,
            "layer_norm_eps": (own.get("norm_kwargs") or {}).get("eps", _DEFAULT_EPS),
            "projection_dim": embed_dim,
            **more,
        }

    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": embed_dim,
        "torch_dtype": "float32",
        "vision_config": tower(
            vision,
            vision["width"] // vision.get("head_width", HEAD_WIDTH),
            vision.get("mlp_ratio", 4.0),
            model_type="clip_vision_model",
            image_size=max(size) if isinstance(size, list | tuple) else size,
            patch_size=vision.get("patch_size", 16),
        ),
        "text_config": tower(
            text,
            text.get("heads", 8),
            text.get("mlp_ratio", 4.0),
            model_type="clip_text_model",
            vocab_size=text.get("vocab_size", 49408),
            max_position_embeddings=context_length,
            bos_token_id=end - 1,
            eos_token_id=end,
            pad_token_id=end,
        ),
    }


def _check_whole(state: dict[str, Tensor]) -> None:
    text, vision = (any(key.startswith(f"{half}_model.") for key in state) for half in ("text", "vision"))
    if not (text and vision):
        raise ValueError(f"it holds only the {'text' if text else 'image'} half of a Hugging Face CLIP")
    if "logit_bias" in state or any(key.startswith("vision_model.head.") for key in state):
        raise ValueError(
            "it is a SigLIP of Hugging Face, expected a CLIPModel; open_clip has SigLIP models under its own names"
        )
    for key in _TRANSPOSED:
        if key not in state:
            raise ValueError(f"it has no {key}: a CLIPModel has projections, a bare tower has none")


def _block_name(key: str) -> str:
    """Theirs to ours for a tensor of a block; a name that is unknown stays, and is refused when it is loaded."""
    for prefix, tower in _TOWERS.items():
        if key.startswith(prefix):
            number, _, rest = key.removeprefix(prefix).partition(".")
            module, _, kind = rest.rpartition(".")
            return f"{tower}.transformer.resblocks.{number}.{_BLOCK.get(module, module)}.{kind}"
    return key


def _their_block(key: str, tensor: Tensor) -> dict[str, Tensor]:
    prefix = next(prefix for prefix, tower in _TOWERS.items() if key.startswith(f"{tower}."))
    number, _, rest = key.split(".resblocks.")[1].partition(".")
    if ".in_proj_" in rest:
        kind = rest.rpartition("_")[2]
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {f"{prefix}{number}.self_attn.{part}_proj.{kind}": own.contiguous() for part, own in parts}
    module, _, kind = rest.rpartition(".")
    theirs = {ours: name for name, ours in _BLOCK.items()}[module]
    return {f"{prefix}{number}.{theirs}.{kind}": tensor.contiguous()}
