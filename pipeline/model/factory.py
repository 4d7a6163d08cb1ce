"""Building a dual encoder from a name, through open_clip's own mechanisms."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import nn

from pipeline.config import ModelConfig, find_config, shipped_names, suggest
from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.packaged import PREFIX, load_in_order, packaged_path

_HF_REFERENCES = ("hf_model_name", "hf_tokenizer_name")


def build_model(config: ModelConfig) -> DualEncoder:
    """A dual encoder with the weights that its recipe names.

    Args:
        config: `name` is a file in configs/models (or a path to one), else an open_clip model name, whose weights
            are `pretrained` (an open_clip tag or a file) or random.

    Raises:
        ValueError: no such model, no such weights, or a context that the model does not have.
        FileNotFoundError: weights ship in a package that is not installed.
    """
    if config.name in open_clip.list_models():
        return _from_open_clip(config)
    try:
        path = find_config(config.name, "models", ".json")
    except FileNotFoundError as error:
        near = suggest(config.name, shipped_names("models", ".json") + open_clip.list_models())
        raise ValueError(f"no model '{config.name}' in configs/models or in open_clip{near}") from error
    if config.pretrained is not None:
        raise ValueError(f"model.pretrained is for open_clip names; '{config.name}' states its own weights")
    spec = json.loads(path.read_text(encoding="utf-8"))
    model = build_from_spec(spec, config, tower_weights=True)
    if "image_weights" in spec:
        load_in_order(model.clip.visual.trunk, spec["image_weights"]["file"], spec["image_weights"]["sha256"])  # type: ignore[union-attr, arg-type]
    return model


def build_from_spec(
    spec: dict[str, Any], config: ModelConfig | None = None, tower_weights: bool = False
) -> DualEncoder:
    """A dual encoder from an open_clip configuration ({"model_cfg", "preprocess_cfg"}), its towers untrained.

    Args:
        spec: as in `open_clip_config.json`; text towers may be `package:` references.
        config: overrides of the image size and the context.
        tower_weights: load a Hugging Face text tower's own weights.
    """
    resolved = copy.deepcopy(spec)
    text_cfg = resolved["model_cfg"]["text_cfg"]
    for key in _HF_REFERENCES:
        if str(text_cfg.get(key, "")).startswith(PREFIX):
            text_cfg[key] = str(packaged_path(text_cfg[key]))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "open_clip_config.json").write_text(json.dumps(resolved), encoding="utf-8")
        clip = _create(
            f"local-dir:{folder}",
            load_weights=False,
            pretrained_text=tower_weights,
            force_image_size=config.image_size if config else None,
        )
    spec = copy.deepcopy(spec)
    if config and config.image_size:
        spec["model_cfg"]["vision_cfg"]["image_size"] = config.image_size
    return _wrap(clip, spec, config)


def _from_open_clip(config: ModelConfig) -> DualEncoder:
    """An open_clip model by name."""
    try:
        clip = _create(config.name, pretrained=config.pretrained, force_image_size=config.image_size)
    except RuntimeError as error:
        raise ValueError(f"model '{config.name}': {error}") from error
    model_cfg = open_clip.get_model_config(config.name)
    if config.image_size:
        model_cfg["vision_cfg"]["image_size"] = config.image_size
    return _wrap(clip, {"model_cfg": model_cfg}, config)


def _create(name: str, **options: Any) -> nn.Module:
    """`open_clip.create_model`, quiet about weights that we load ourselves, with the text tower as its own module."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return open_clip.create_model(name, force_custom_text=True, **options)
    finally:
        logging.disable(previous)


def _wrap(clip: nn.Module, spec: dict[str, Any], config: ModelConfig | None) -> DualEncoder:
    """Record what the model was built from, and let its text tower take captions shorter than its context."""
    spec["model_cfg"]["custom_text"] = True
    size = clip.visual.preprocess_cfg["size"]  # type: ignore[union-attr, index]
    spec["preprocess_cfg"] = {**clip.visual.preprocess_cfg, "size": max(size) if isinstance(size, tuple) else size}  # type: ignore[union-attr, dict-item]
    own = int(spec["model_cfg"]["text_cfg"].get("context_length", 77))
    wanted = (config.context_length if config else None) or own
    if wanted > own:
        raise ValueError(f"model.context_length is {wanted}, but this model's text tower reads {own} tokens")
    spec["model_cfg"]["text_cfg"]["context_length"] = own
    spec["context_length"] = wanted
    transformer = getattr(clip.text, "transformer", None)
    if isinstance(getattr(clip.text, "attn_mask", None), torch.Tensor) and transformer is not None:
        transformer.register_forward_pre_hook(_cut_causal_mask, with_kwargs=True)
    return DualEncoder(clip, spec, context_length=wanted)


def _cut_causal_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """open_clip builds the causal mask for the full context; captions here are cut to the batch's longest."""
    mask = kwargs.get("attn_mask")
    length = args[0].shape[1]
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != length:
        kwargs = {**kwargs, "attn_mask": mask[..., :length, :length]}
    return args, kwargs
