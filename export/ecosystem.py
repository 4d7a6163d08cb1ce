"""A dual encoder in the formats that others read: open_clip's folder, Hugging Face's CLIPModel, Long-CLIP's file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transformer import TextTransformer, VisionTransformer
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.model import DualEncoder
from pipeline.model.formats.hugging_face import config_of, to_hugging_face
from pipeline.model.formats.openai import HEAD_WIDTH, is_plain, to_longclip
from pipeline.model.packaged import PREFIX
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.runs import MODEL_CONFIG, WEIGHTS, write_json

LONGCLIP_CONTEXT = 248  # the official code's masks are that long
_HF_BPE = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}


def write_open_clip(model: DualEncoder, folder: Path, final: Path) -> None:
    """Write what `open_clip.create_model("local-dir:FOLDER")` and its `get_tokenizer` read.

    A Hugging Face text tower goes along as its configuration and tokenizer. Where it is no model of the Hub, open_clip
    finds it by the folder's path as it is given here, a relative one from the working directory; `pipeline` finds it
    in the folder wherever that is.

    Args:
        model: fp32 on the CPU.
        folder: where to write.
        final: the path that the folder will be loaded by.
    """
    state, model_cfg = _plain_state(model), _model_cfg(model)
    text_cfg = model_cfg["text_cfg"]
    if isinstance(model.clip.text, HFTextEncoder):
        model.clip.text.config.save_pretrained(folder)
        CaptionTokenizer(model.spec).tokenizer.tokenizer.save_pretrained(folder)
        text_cfg["hf_model_name"] = _portable(text_cfg["hf_model_name"], final)
        text_cfg["hf_tokenizer_name"] = _portable(text_cfg.get("hf_tokenizer_name"), final)
    elif text_cfg.get("hf_tokenizer_name"):
        CaptionTokenizer(model.spec).tokenizer.save_pretrained(str(folder))
        text_cfg["hf_tokenizer_name"] = _portable(text_cfg["hf_tokenizer_name"], final)
    write_json(folder / MODEL_CONFIG, {"model_cfg": model_cfg, "preprocess_cfg": model.spec["preprocess_cfg"]})
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def write_hugging_face(model: DualEncoder, folder: Path) -> None:
    """Write what `transformers.CLIPModel`, `CLIPTokenizerFast` and `CLIPImageProcessor` read.

    Raises:
        ValueError: CLIPModel has no such model; says why.
    """
    if (reason := hf_refusal(model)) is not None:
        raise ValueError(f"Hugging Face's CLIPModel cannot express this model: {reason}; convert it --to open_clip")
    spec = {**model.spec, "model_cfg": _model_cfg(model)}
    write_json(folder / "config.json", config_of(spec, model.context_length))
    save_file(to_hugging_face(_plain_state(model)), folder / "model.safetensors", metadata={"format": "pt"})
    preprocess = Preprocess.from_config(model.spec["preprocess_cfg"])
    write_json(folder / "preprocessor_config.json", preprocess.to_hugging_face())
    _write_hf_tokenizer(model, folder)


def write_longclip(model: DualEncoder, path: Path) -> None:
    """Write a state dict that the official Long-CLIP code loads.

    Raises:
        ValueError: that code has no such model; says why.
    """
    if (reason := longclip_refusal(model)) is not None:
        raise ValueError(f"Long-CLIP's code cannot express this model: {reason}; convert it --to open_clip")
    torch.save(to_longclip(_plain_state(model)), path)


def hf_refusal(model: DualEncoder) -> str | None:
    """Why a model is no CLIPModel, or None where it is one."""
    clip: Any = model.clip
    visual, text = clip.visual, clip.text
    if not isinstance(visual, VisionTransformer):
        return f"its image tower is a {type(getattr(visual, 'trunk', visual)).__name__}, not a plain ViT"
    if not isinstance(text, TextTransformer):
        return "its text tower is another Hugging Face model, not CLIP's own transformer"
    vision_cfg, text_cfg = (model.spec["model_cfg"][key] for key in ("vision_cfg", "text_cfg"))
    if visual.attn_pool is not None or visual.pool_type != "tok" or visual.final_ln_after_pool:
        return "its image tower does not pool its class token behind the last norm"
    if isinstance(visual.ln_pre, nn.Identity) or visual.patch_size[0] != visual.patch_size[1]:
        return "its image tower has no norm before its layers, or patches that are not square"
    if text.attn_mask is None or text.cls_emb is not None or text.pool_type not in ("argmax", "eos"):
        return "its text tower does not read from left to right to its end token"
    if not isinstance(text.text_projection, nn.Parameter):
        return "its text projection is no plain matrix"
    if clip.logit_bias is not None:
        return "it has a bias beside its temperature (SigLIP)"
    for cfg in (vision_cfg, text_cfg):
        more = [key for key in ("ls_init_value", "block_type", "qk_norm", "scale_heads", "act_kwargs") if cfg.get(key)]
        if more:
            return f"its layers have more than CLIP's ({', '.join(more)})"
    return None


def longclip_refusal(model: DualEncoder) -> str | None:
    """Why the official Long-CLIP code cannot build a model, or None where it can."""
    clip: Any = model.clip
    if not is_plain(model.encoder_state()) or not isinstance(clip.text, TextTransformer):
        return "its towers are not OpenAI CLIP's own"
    if isinstance(clip.visual, VisionTransformer) and (reason := hf_refusal(model)) is not None:
        return reason
    model_cfg = model.spec["model_cfg"]
    vision_cfg, text_cfg = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    if not model_cfg.get("quick_gelu"):
        return "it was trained with GELU, and that code always uses QuickGELU"
    if model.context_length != LONGCLIP_CONTEXT:
        return (
            f"its context is {model.context_length} tokens, and that code's is {LONGCLIP_CONTEXT} "
            f"(train with model.context_length={LONGCLIP_CONTEXT})"
        )
    if vision_cfg.get("head_width", HEAD_WIDTH) != HEAD_WIDTH or text_cfg["heads"] * HEAD_WIDTH != text_cfg["width"]:
        return f"its heads are not {HEAD_WIDTH} wide"
    if {vision_cfg.get("mlp_ratio", 4.0), text_cfg.get("mlp_ratio", 4.0)} != {4.0}:
        return "the hidden layers of its blocks are not four times their width"
    return None


def fits_tokenizer(model: DualEncoder) -> bool:
    """Whether the model's vocabulary is that of the tokenizer that its configuration names."""
    text_cfg = model.spec["model_cfg"]["text_cfg"]
    return bool(text_cfg.get("hf_tokenizer_name")) or text_cfg.get("vocab_size", 49408) == 49408


def _portable(reference: str | None, final: Path) -> str:
    """A name on the Hugging Face Hub as it is; a path of this machine, or a package of ours, as the folder's path."""
    local = not reference or reference.startswith(PREFIX) or Path(reference).exists()
    return str(final) if local else str(reference)


def _plain_state(model: DualEncoder) -> dict[str, Tensor]:
    """The weights, with a position table that is no longer than the context."""
    state = {name: tensor.detach().contiguous().clone() for name, tensor in model.encoder_state().items()}
    if isinstance(model.clip.text, TextTransformer) and model.clip.text.cls_emb is None:
        table = state["text.positional_embedding"]
        state["text.positional_embedding"] = table[: model.context_length].clone()
    return state


def _model_cfg(model: DualEncoder) -> dict[str, Any]:
    model_cfg: dict[str, Any] = copy.deepcopy(model.spec["model_cfg"])
    if not isinstance(model.clip.text, TextTransformer) or model.clip.text.cls_emb is None:
        model_cfg["text_cfg"]["context_length"] = model.context_length
    return model_cfg


def _write_hf_tokenizer(model: DualEncoder, folder: Path) -> None:
    """CLIP's vocabulary in Hugging Face's form, or the Hugging Face tokenizer that the model has."""
    from transformers import CLIPTokenizerFast

    if not fits_tokenizer(model):
        return
    own = CaptionTokenizer(model.spec).tokenizer
    if not isinstance(own, SimpleTokenizer):
        own.tokenizer.save_pretrained(folder)
        return
    vocabulary = {_HF_BPE.get(token, token): number for token, number in own.encoder.items()}
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    merges_file.write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n", encoding="utf-8")
    tokenizer = CLIPTokenizerFast(str(vocab_file), str(merges_file), model_max_length=model.context_length)
    tokenizer.save_pretrained(folder)
