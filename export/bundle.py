"""A trained dual encoder to a bundle, the folder that serves; see `export.manifest` for what lies in it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime

from export.hub import write_config, write_preprocess
from export.manifest import FORMAT, FORMAT_VERSION, MANIFEST, check_bundle, is_bundle, list_files, load_manifest
from export.onnx import write_graphs
from export.parity import run_parity
from export.reference import Pairs, write_reference
from export.runtime import OPTIMIZATION_LEVEL
from export.tokenizer import write_tokenizer
from pipeline import __version__
from pipeline.model import DualEncoder
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.runs import write_json
from shards.staging import clear_leftovers, staged

__all__ = ["BundleReport", "check_bundle", "export_bundle", "load_manifest"]

_PACKAGES = ("torch", "open_clip_torch", "timm", "transformers", "tokenizers", "onnx", "onnxscript")
_SOURCE = ("run", "recipe", "step", "epoch")


@dataclass(frozen=True)
class BundleReport:
    """What an export gave.

    path: the bundle. image_max_abs_diff, text_max_abs_diff: largest difference to torch of any number of an
    L2-normalised embedding, over all batch sizes. pairs: on which this was measured. size: of the bundle, bytes.
    export_s, parity_s: seconds. parity: the full report, which the manifest also holds.
    """

    path: Path
    image_max_abs_diff: float
    text_max_abs_diff: float
    pairs: int
    size: int
    export_s: float
    parity_s: float
    parity: dict[str, Any]


def export_bundle(
    model: DualEncoder,
    meta: dict[str, Any],
    out: Path,
    pairs: Pairs,
    opset: int = 18,
    progress: Callable[[str], None] | None = None,
) -> BundleReport:
    """Export a model, check that the result says what torch says, and only then put it in place.

    Args:
        model: fp32 on the CPU, as `load_checkpoint` gives it.
        meta: of its checkpoint; run, recipe, step and epoch are written down.
        out: the bundle's folder. A bundle that is there is replaced once the new one has passed.
        pairs: real pairs for the check, as `ShardReader` gives them; the first 256 are used.
        opset: of the default ONNX domain.
        progress: called with what is being done.

    Raises:
        ValueError: `out` is something else than a bundle, the model cannot be exported, or the graphs differ from
            torch; nothing is left behind, and a bundle that was there stays.
    """
    out = Path(out)
    _refuse_other_folders(out)
    clear_leftovers(out)
    say = progress or (lambda _: None)
    training = model.training
    model.eval()
    try:
        with staged(out, overwrite=True) as folder, tempfile.TemporaryDirectory() as scratch:
            start = time.monotonic()
            say("exporting both towers to ONNX")
            manifest = _write_files(model, meta, folder, opset)
            exported = time.monotonic()
            say("encoding real pairs with torch")
            reference = Path(scratch, "reference.npz")
            write_reference(model, pairs, reference)
            say("comparing onnxruntime with torch")
            parity = run_parity(folder, reference)
            done = time.monotonic()
            write_json(folder / MANIFEST, {**manifest, "parity": parity})
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    finally:
        model.train(training)
    return BundleReport(
        path=out,
        image_max_abs_diff=parity["image_max_abs_diff"],
        text_max_abs_diff=parity["text_max_abs_diff"],
        pairs=parity["pairs"],
        size=size,
        export_s=exported - start,
        parity_s=done - exported,
        parity=parity,
    )


def _refuse_other_folders(out: Path) -> None:
    if out.exists() and not is_bundle(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not a bundle, so it is not replaced; name another folder")


def _write_files(model: DualEncoder, meta: dict[str, Any], folder: Path, opset: int) -> dict[str, Any]:
    """Everything but the parity report; returns the manifest so far."""
    preprocess = Preprocess.from_config(model.spec["preprocess_cfg"])
    embed_dim = int(model.spec["model_cfg"]["embed_dim"])
    write_config(folder, embed_dim, preprocess.size, model.context_length, CaptionTokenizer(model.spec).pad_id)
    write_preprocess(folder, preprocess)
    write_tokenizer(model.spec, folder)
    write_graphs(model, folder, opset)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "embed_dim": embed_dim,
        "image_size": preprocess.size,
        "context_length": model.context_length,
        "logit_scale": model.logit_scale().detach().item(),
        "opset": opset,
        "optimization_level": OPTIMIZATION_LEVEL,
        "source": {key: meta[key] for key in _SOURCE if key in meta},
        "model": _without_paths(model.spec),
        "versions": _versions(),
        "files": list_files(folder),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _versions() -> dict[str, str]:
    return {
        "hn-clip": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "onnxruntime": onnxruntime.__version__,
        **{name: version(name) for name in _PACKAGES},
    }


def _without_paths(value: Any) -> Any:
    """A model's specification with absolute paths cut to their last part: a bundle tells nothing of the machine."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
