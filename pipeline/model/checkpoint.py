"""A dual encoder from weights of any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.factory import build_from_spec, load_weights
from pipeline.model.formats import read_weights


def load_checkpoint(path: str | Path, root: str | Path = "runs") -> tuple[DualEncoder, dict[str, Any]]:
    """The dual encoder of a run's checkpoint, or of weights of any format, in eval mode on the CPU, and its metadata.

    Files and folders of open_clip, OpenAI's CLIP, Long-CLIP and Hugging Face's CLIPModel are recognised by content.
    Nothing in them is run.

    Args:
        path: a checkpoint folder, a run folder, or a name under `root` (see `find_checkpoint`), or a file or folder of
            weights (see `pipeline.model.formats.read_weights`).
        root: where runs are kept.

    Returns:
        The model, and the checkpoint's manifest with its `path` and `format`; for weights of others what is known of
        them, and a `note` where their activation had to be assumed.

    Raises:
        FileNotFoundError, ValueError: nothing is there, files do not match their manifest, or they are not the weights
            of a CLIP; says what they are and what was expected.
    """
    weights = read_weights(path, root)
    model = build_from_spec(weights.spec)
    load_weights(model, weights)
    return model.eval(), weights.meta()
