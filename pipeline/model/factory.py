"""Building a dual encoder from a name or from weights, through open_clip's own mechanisms."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.model import resize_pos_embed
from torch import nn

from pipeline.config import find_config, shipped_names, suggest
from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.formats import Weights, read_weights
from pipeline.model.memory import check_patch_dropout
from pipeline.model.packaged import PREFIX, load_in_order, packaged_path
from pipeline.model.positions import stretch
from pipeline.sections import ModelConfig

_HF_REFERENCES = ("hf_model_name", "hf_tokenizer_name")


def build_model(config: ModelConfig, init: Weights | None = None) -> DualEncoder:
    """A dual encoder with the weights that its recipe names.

    Args:
        config: `name` is a file in configs/models (or a path to one), an open_clip model name, whose weights are
            `pretrained` (an open_clip tag or a file) or random, or a file or folder of weights.
        init: load these weights into the named architecture.

    Raises:
        ValueError: no such model, no such weights, weights of another model, or a context that it cannot have.
        FileNotFoundError: weights ship in a package that is not installed.
    """
    if config.name in open_clip.list_models():
        return _from_open_clip(config, init)
    if _is_weights(config.name):
        named = read_weights(config.name)
        model = _from_spec(named.spec, config, init or named)
        load_weights(model, named if init is None else init)
        return _with_context(model, config)
    try:
        path = find_config(config.name, "models", ".json")
    except FileNotFoundError as error:
        near = suggest(config.name, shipped_names("models", ".json") + open_clip.list_models())
        raise ValueError(f"no model '{config.name}' in configs/models or in open_clip{near}") from error
    if config.pretrained is not None:
        raise ValueError(f"model.pretrained is for open_clip names; '{config.name}' states its own weights")
    spec = json.loads(path.read_text(encoding="utf-8"))
    model = _from_spec(spec, config, init, tower_weights=True)
    if init is not None:
        load_weights(model, init)
    elif "image_weights" in spec:
        load_in_order(model.clip.visual.trunk, spec["image_weights"]["file"], spec["image_weights"]["sha256"])  # type: ignore[union-attr, arg-type]
    return _with_context(model, config)


def build_from_spec(spec: dict[str, Any]) -> DualEncoder:
    """A dual encoder from an open_clip configuration ({"model_cfg", "preprocess_cfg"}), its towers untrained.

    Args:
        spec: as in `open_clip_config.json`; text towers may be `package:` references.
    """
    return _from_spec(spec)


def load_weights(model: DualEncoder, weights: Weights) -> None:
    """Load weights into a model of their architecture; the positions of the image are resized to its own grid.

    Raises:
        ValueError: they are those of another model, or were trained with another activation.
    """
    if weights.activation_known and _is_plain(model):
        own, theirs = (bool(spec["model_cfg"].get("quick_gelu")) for spec in (model.spec, weights.spec))
        if own != theirs:
            names = {True: "QuickGELU", False: "GELU"}
            raise ValueError(
                f"{weights.path} was trained with {names[theirs]}, and this model has {names[own]}: the same tensors "
                f"would mean something else. Use model.name={weights.path}, or the model's name with or without "
                "-quickgelu"
            )
    state = dict(weights.state)
    resize_pos_embed(state, model.clip)
    try:
        model.load_encoder_state(state)
    except ValueError as error:
        raise ValueError(f"{weights.path}: {error}") from error


def _from_spec(
    spec: dict[str, Any],
    config: ModelConfig | None = None,
    weights: Weights | None = None,
    tower_weights: bool = False,
) -> DualEncoder:
    """An untrained model, with the text context of the weights that come next.

    Args:
        spec: see `build_from_spec`.
        config: overrides of the image size and patch dropout.
        weights: what will be loaded.
        tower_weights: load a Hugging Face text tower's own weights.
    """
    spec = copy.deepcopy(spec)
    _set_table(spec["model_cfg"], weights)
    resolved = copy.deepcopy(spec)
    text_cfg = resolved["model_cfg"]["text_cfg"]
    for key in _HF_REFERENCES:
        if str(text_cfg.get(key, "")).startswith(PREFIX):
            text_cfg[key] = str(packaged_path(text_cfg[key]))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "open_clip_config.json").write_text(json.dumps(resolved), encoding="utf-8")
        clip = _create(f"local-dir:{folder}", config, load_weights=False, pretrained_text=tower_weights)
    if config and config.image_size:
        spec["model_cfg"]["vision_cfg"]["image_size"] = config.image_size
    return _wrap(clip, spec)


def _from_open_clip(config: ModelConfig, init: Weights | None) -> DualEncoder:
    """An open_clip model by name."""
    weights = init
    if weights is None and config.pretrained is not None and Path(config.pretrained).exists():
        weights = read_weights(config.pretrained)
    model_cfg = open_clip.get_model_config(config.name)
    if config.image_size:
        model_cfg["vision_cfg"]["image_size"] = config.image_size
    spec = {"model_cfg": model_cfg}
    if weights is None:
        try:
            clip = _create(config.name, config, pretrained=config.pretrained)
        except RuntimeError as error:
            raise ValueError(f"model '{config.name}': {error}") from error
        return _with_context(_wrap(clip, spec), config)
    _set_table(model_cfg, weights)
    context = model_cfg["text_cfg"].get("context_length")
    model = _wrap(_create(config.name, config, load_weights=False, force_context_length=context), spec)
    load_weights(model, weights)
    return _with_context(model, config)


def _create(name: str, config: ModelConfig | None, **options: Any) -> nn.Module:
    """`open_clip.create_model`, quiet about weights that we load ourselves, with the text tower as its own module."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    if config:
        options |= {"force_image_size": config.image_size, "force_patch_dropout": config.patch_dropout}
    try:
        clip = open_clip.create_model(name, force_custom_text=True, **options)
    except TypeError as error:
        if "patch_drop_rate" not in str(error):
            raise
        raise ValueError("model.patch_dropout: this timm image tower has no patches to drop; leave it off") from error
    finally:
        logging.disable(previous)
    check_patch_dropout(clip.visual, (config.patch_dropout if config else None) or 0.0)
    return clip


def _wrap(clip: nn.Module, spec: dict[str, Any]) -> DualEncoder:
    """Record what the model was built from, and let its text tower take captions shorter than its context."""
    spec["model_cfg"]["custom_text"] = True
    size = clip.visual.preprocess_cfg["size"]  # type: ignore[union-attr, index]
    spec["preprocess_cfg"] = {**clip.visual.preprocess_cfg, "size": max(size) if isinstance(size, tuple) else size}  # type: ignore[union-attr, dict-item]
    own = int(spec["model_cfg"]["text_cfg"].get("context_length", 77))
    spec["model_cfg"]["text_cfg"]["context_length"] = own
    spec["context_length"] = int(spec.get("context_length", own))
    transformer = getattr(clip.text, "transformer", None)
    if isinstance(getattr(clip.text, "attn_mask", None), torch.Tensor) and transformer is not None:
        transformer.register_forward_pre_hook(_cut_causal_mask, with_kwargs=True)
    return DualEncoder(clip, spec, context_length=spec["context_length"])


def _with_context(model: DualEncoder, config: ModelConfig) -> DualEncoder:
    """The context that the recipe asks for: captions are cut to less, a position table is stretched to more."""
    text_cfg = model.spec["model_cfg"]["text_cfg"]
    wanted = config.context_length or model.context_length
    if wanted > text_cfg["context_length"]:
        try:
            stretch(model.clip.text, wanted, config.keep_positions)
        except ValueError as error:
            raise ValueError(
                f"model.context_length is {wanted}, but this model's text tower reads {text_cfg['context_length']} "
                f"tokens and cannot be stretched: {error}"
            ) from error
        model.clip.context_length = wanted  # type: ignore[assignment]
        text_cfg["context_length"] = wanted
    model.context_length = model.spec["context_length"] = wanted
    return model


def _set_table(model_cfg: dict[str, Any], weights: Weights | None) -> None:
    """The context that the weights' position table has; a Hugging Face tower's is in its own configuration."""
    if weights is not None and "hf_model_name" not in model_cfg["text_cfg"]:
        model_cfg["text_cfg"]["context_length"] = weights.context_length


def _is_plain(model: DualEncoder) -> bool:
    """Whether `quick_gelu` says anything about this model: timm and Hugging Face towers have their own activations."""
    model_cfg = model.spec["model_cfg"]
    return "timm_model_name" not in model_cfg["vision_cfg"] or "hf_model_name" not in model_cfg["text_cfg"]


def _is_weights(name: str) -> bool:
    """Whether a model's name is the path of weights rather than of a configuration."""
    path = Path(name)
    if not path.is_file():
        return path.is_dir()
    with path.open("rb") as file:
        return not file.read(64).lstrip().startswith(b"{")


def _cut_causal_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """open_clip builds the causal mask for the full context; captions here are cut to the batch's longest."""
    mask = kwargs.get("attn_mask")
    length = args[0].shape[1]
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != length:
        kwargs = {**kwargs, "attn_mask": mask[..., :length, :length]}
    return args, kwargs
