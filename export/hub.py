"""A bundle's configuration files, in Hugging Face's keys, so that other runtimes can read them. No torch."""

from __future__ import annotations

from pathlib import Path

from export.manifest import CONFIG, PREPROCESSOR
from pipeline.preprocess import Preprocess
from pipeline.runs import read_json, write_json


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
    write_json(folder / PREPROCESSOR, preprocess.to_hugging_face())


def read_preprocess(folder: Path) -> Preprocess:
    """The inverse of `write_preprocess`."""
    return Preprocess.from_hugging_face(read_json(folder / PREPROCESSOR))
