"""Does a bundle say what torch says? Compared stage by stage on real pairs, in a process of its own.

    python -m export.parity BUNDLE reference.npz

prints the report as JSON and exits with 1 where a stage differs. The process has no torch, and serves with the same
code and at the same optimisation level as any user of the bundle: onnxruntime can crash on a graph, and that must not
take the exporting process with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.ranks import TOP_K, compare_ranks
from export.runtime import OPTIMIZATION_LEVEL, Bundle

BATCH_SIZES = (1, 2, 3, 7, 64)
CHUNK = 64
"""Pairs per call over all pairs, and pictures whose pixels are compared."""

TOLERANCE = 1e-4
"""Largest difference of any number of an L2-normalised embedding."""

PIXEL_TOLERANCE = 1e-6
"""Rounding of the last bit; one grey level is 4e-3 or more."""

_CHILD = (sys.executable, "-m", "export.parity")


def run_parity(bundle: Path, reference: Path) -> dict[str, Any]:
    """Compare a bundle with a reference in a child process.

    Args:
        bundle: complete but for the parity report in its manifest.
        reference: written by `export.reference.write_reference`.

    Returns:
        The report of `compare`, whose every stage passed.

    Raises:
        ValueError: a stage differs, with the figures; or the child crashed, with the signal.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [*_CHILD, str(bundle), str(reference)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise ValueError(
            f"onnxruntime {ort.__version__} crashed ({name}) on the exported graphs at {OPTIMIZATION_LEVEL}; "
            "nothing was written. Try another version of onnxruntime, or free memory if it was killed"
        )
    try:
        report: dict[str, Any] = json.loads(child.stdout)
    except json.JSONDecodeError:
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"the parity check could not run (exit code {child.returncode}): {last}") from None
    if report["failures"]:
        raise ValueError(f"the exported graphs differ from torch, nothing was written: {'; '.join(report['failures'])}")
    return report


def compare(bundle: Bundle, reference: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The report on a bundle: token ids, pixels, embeddings at every batch size, ranks, and what failed of these."""
    images, captions = _pairs(reference)
    batches = {}
    for size in BATCH_SIZES:
        rows = [i % len(images) for i in range(size)]
        embeds = bundle.encode_images([images[i] for i in rows]), bundle.encode_texts([captions[i] for i in rows])
        batches[str(size)] = _differences(embeds, reference, str(size))
    chunks = range(0, len(images), CHUNK)
    image_embeds = np.concatenate([bundle.encode_images(images[start : start + CHUNK]) for start in chunks])
    text_embeds = np.concatenate([bundle.encode_texts(captions[start : start + CHUNK]) for start in chunks])
    batches["all"] = _differences((image_embeds, text_embeds), reference, "all")
    largest = {side: max(batch[side] for batch in batches.values()) for side in ("image", "text")}
    ids = bundle.tokenize(captions)
    served = np.stack([bundle.preprocess.from_bytes(image) for image in images[:CHUNK]])
    report = {
        "pairs": len(images),
        "provider": bundle.provider,
        "optimization_level": OPTIMIZATION_LEVEL,
        "tolerance": TOLERANCE,
        "token_ids_equal": bool(np.array_equal(ids, reference["input_ids"])),
        "pixels_max_abs_diff": _max_abs_diff(served, reference["pixel_values"]),
        "image_max_abs_diff": largest["image"],
        "text_max_abs_diff": largest["text"],
        "embeddings_max_abs_diff": batches,
        "ranks": compare_ranks(
            (reference["image_all"], reference["text_all"]), (image_embeds, text_embeds), tie=max(largest.values())
        ),
    }
    return {**report, "failures": _failures(report)}


def _pairs(reference: Mapping[str, NDArray[Any]]) -> tuple[list[bytes], list[str]]:
    """The pictures and captions that the reference carries."""
    data, ends = reference["image_bytes"].tobytes(), reference["image_ends"].tolist()
    images = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return images, json.loads(reference["captions"].tobytes())


def _differences(
    embeds: tuple[NDArray[np.float32], NDArray[np.float32]], reference: Mapping[str, NDArray[Any]], name: str
) -> dict[str, float]:
    return {
        side: _max_abs_diff(own, reference[f"{side}_{name}"])
        for side, own in zip(("image", "text"), embeds, strict=True)
    }


def _max_abs_diff(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest difference; infinite where a value is not finite, so that no comparison takes it for small."""
    largest = float(np.abs(a - b).max()) if a.shape == b.shape else np.inf
    return largest if np.isfinite(largest) else float("inf")


def _failures(report: dict[str, Any]) -> list[str]:
    failures = []
    if not report["token_ids_equal"]:
        failures.append("the token ids differ")
    if report["pixels_max_abs_diff"] > PIXEL_TOLERANCE:
        failures.append(f"the pixels differ by up to {report['pixels_max_abs_diff']:.1e}")
    for size, batch in report["embeddings_max_abs_diff"].items():
        for side, difference in batch.items():
            if difference >= TOLERANCE:
                name = "over all pairs" if size == "all" else f"at batch {size}"
                failures.append(f"{side} embeddings {name} differ by up to {difference:.1e} (limit {TOLERANCE:.0e})")
    for direction, ranks in report["ranks"].items():
        if ranks["different"]:
            failures.append(
                f"{direction}: the first {TOP_K} differ for {ranks['different']} of {ranks['queries']} queries"
            )
    return failures


def main(bundle: str, reference: str) -> int:
    """Print the report; 0 where every stage passed."""
    with np.load(reference) as arrays:
        report = compare(Bundle(bundle), arrays)
    print(json.dumps(report))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
