"""Encoders from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.factory import build_from_spec
from pipeline.runs import MODEL_CONFIG, WEIGHTS, Checkpoint, find_checkpoint, read_json


def load_checkpoint(path: str | Path, root: str | Path = "runs") -> tuple[DualEncoder, dict[str, Any]]:
    """The dual encoder of a run's checkpoint, in eval mode on the CPU, and its metadata.

    Args:
        path: a checkpoint folder, a run folder, or a name under `root`; see `find_checkpoint`.
        root: where runs are kept.

    Returns:
        The model, and the checkpoint's manifest with its `path` (step, epoch, recipe, run).

    Raises:
        ValueError: no such checkpoint, or one whose files do not match its manifest.
    """
    checkpoint = find_checkpoint(str(path), Path(root))
    checkpoint.check()
    model = build_from_spec(read_json(checkpoint.path / MODEL_CONFIG))
    load_weights(model, checkpoint)
    manifest = read_json(checkpoint.path / "manifest.json")
    return model.eval(), {**manifest, "path": str(checkpoint.path)}


def load_weights(model: DualEncoder, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's encoders into a model of the same architecture."""
    model.load_encoder_state(load_file(checkpoint.path / WEIGHTS))
