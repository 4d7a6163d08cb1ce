"""`pipeline export --onnx`: a run's encoders as a bundle that serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.bundle import export_bundle
from pipeline.model import load_checkpoint
from pipeline.model.formats import locate
from pipeline.runs import find_checkpoint
from shards.reader import ShardReader, resolve_set, split_dir

_SPLITS = ("val", "test", "train")  # the first that a set has is used for the parity check


def export_checkpoint(
    reference: str | None, out: Path | None, data: str | None, opset: int, runs: Path, say: Callable[[str], None]
) -> None:
    """Export a checkpoint, checked on real pairs.

    Args:
        reference: a checkpoint, a run, a name under `runs`, or weights of any format; None is the newest run.
        out: the bundle's folder; `bundle` in the run when None.
        data: a set of shards for the parity check; the one that the run trained on when None.
        opset: of the default ONNX domain.
        runs: where runs are kept.
        say: called with every line for the reader.

    Raises:
        ValueError: no such checkpoint, no pairs, or a bundle that differs from torch.
    """
    path = find_checkpoint(None, runs).path if reference is None else locate(reference, runs)
    model, meta = load_checkpoint(path)
    say(describe(meta))
    data = data or meta.get("data_set")
    if "run" not in meta and (data is None or out is None):
        raise ValueError(f"{path} belongs to no run: say where the bundle goes, --out, and a set of pairs, --data")
    assert data is not None
    pairs = _pairs(data)
    target = out or path.parent.parent / "bundle"
    report = export_bundle(model, meta, target, pairs, opset, progress=say)
    say(
        f"equal to torch on {report.pairs} pairs at every batch size: largest difference of images "
        f"{report.image_max_abs_diff:.1e}, of texts {report.text_max_abs_diff:.1e}, same top-10 ranks"
    )
    say(f"{target}: {report.size / 1e6:.1f} MB; export {report.export_s:.0f} s, check {report.parity_s:.0f} s")
    say(f"next: pipeline index {target} {data} --out index")


def describe(meta: dict[str, Any]) -> str:
    """One line on what was read, with what had to be assumed; `meta` as `load_checkpoint` gives it."""
    if "run" in meta:
        return f"{meta['path']}: step {meta['step']} of recipe {meta['recipe']}"
    return "\n".join([f"{meta['path']}: {meta['format']}", *([f"note: {meta['note']}"] if "note" in meta else [])])


def _pairs(data: str) -> ShardReader:
    """A held-out split of a set, for real pictures and captions."""
    try:
        folder = resolve_set(data)
    except (ValueError, OSError) as error:
        raise ValueError(f"the parity check needs real pairs, and {error}; name a set by --data") from error
    split = next((s for s in _SPLITS if (folder / s / "index.json").is_file()), _SPLITS[0])
    return ShardReader(split_dir(folder, split))
