"""A bundle's configuration files, in Hugging Face's keys, so that other runtimes can read them. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export.manifest import CONFIG, PREPROCESSOR
from pipeline.preprocess import Preprocess
from pipeline.runs import read_json, write_json

_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's own numbers


def write_config(folder: Path, embed_dim: int, image_size: int, context_length: int, pad_id: int) -> None:
    """Write `config.json`. Its model type names the interface, two towers with projections, not the architecture."""
    config = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": embed_dim,
        "vision_config": {"model_type": "clip_vision_model", "image_size": image_size, "projection_dim": embed_dim},
        "text_config": {
            "model_type": "clip_text_model",
            "max_position_embeddings": context_length,
            "pad_token_id": pad_id,
            "projection_dim": embed_dim,
        },
    }
    write_json(folder / CONFIG, config)


def write_preprocess(folder: Path, preprocess: Preprocess) -> None:
    """Write `preprocessor_config.json`."""
    square = {"height": preprocess.size, "width": preprocess.size}
    shortest = preprocess.resize_mode == "shortest"
    config = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": preprocess.size} if shortest else square,
        "resample": _RESAMPLE[preprocess.interpolation],
        "do_center_crop": shortest,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    write_json(folder / PREPROCESSOR, config)


def read_preprocess(folder: Path) -> Preprocess:
    """The inverse of `write_preprocess`."""
    config: dict[str, Any] = read_json(folder / PREPROCESSOR)
    return Preprocess(
        size=int(config["crop_size"]["height"]),
        mean=tuple(config["image_mean"]),
        std=tuple(config["image_std"]),
        interpolation={number: name for name, number in _RESAMPLE.items()}[config["resample"]],
        resize_mode="shortest" if "shortest_edge" in config["size"] else "squash",
    )
