"""A bundle, served with onnxruntime, numpy, Pillow, tokenizers and ftfy. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.captions import BundleTokenizer
from export.hub import read_preprocess
from export.manifest import TEXT_GRAPH, VISION_GRAPH, check_bundle

OPTIMIZATION_LEVEL = "ORT_ENABLE_ALL"
"""onnxruntime's graph optimisation while serving; the parity check runs at the same level."""

Device = Literal["cpu", "cuda"]
_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class Bundle:
    """Both encoders of a bundle; an `Encoder` in the sense of `pipeline.evaluate`.

    Args:
        path: the bundle's folder; every file is compared with the manifest first.
        threads: of one run of a graph; None leaves it to onnxruntime, which takes every core.
        device: `cuda` fails where onnxruntime cannot use it, instead of falling back to the CPU unseen.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not a bundle, a file is missing or has changed, or onnxruntime cannot run it here.
    """

    def __init__(self, path: str | Path, threads: int | None = None, device: Device = "cpu") -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = check_bundle(self.path)
        self.embed_dim = int(self.manifest["embed_dim"])
        self.preprocess = read_preprocess(self.path)
        self.tokenizer = BundleTokenizer(self.path)
        self._vision = _session(self.path / VISION_GRAPH, threads, device)
        self._text = _session(self.path / TEXT_GRAPH, threads, device)
        self._decoders = ThreadPoolExecutor(4)  # Pillow lets go of the GIL while it decodes and resizes

    @property
    def provider(self) -> str:
        """What runs the graphs, e.g. `CPUExecutionProvider`."""
        return str(self._vision.get_providers()[0])

    def encode_images(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """Encoded pictures of any format to float32 [B, D], L2-normalised.

        Raises:
            ValueError: a picture does not decode.
        """
        if not images:
            return np.zeros((0, self.embed_dim), np.float32)
        pixels = np.stack(list(self._decoders.map(self.preprocess.from_bytes, images)))
        return np.asarray(self._vision.run(["image_embeds"], {"pixel_values": pixels})[0])

    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """Captions to float32 [B, D], L2-normalised."""
        if not captions:
            return np.zeros((0, self.embed_dim), np.float32)
        return np.asarray(self._text.run(["text_embeds"], {"input_ids": self.tokenize(captions)})[0])

    def tokenize(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """int64 ids [B, L], L the length of the longest caption here, at most the context."""
        return self.tokenizer(captions)


def _session(file: Path, threads: int | None, device: Device) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, OPTIMIZATION_LEVEL)
    options.intra_op_num_threads = threads or 0
    wanted = _PROVIDERS[device][0]
    # The list of available providers names those that were compiled in; only a session knows what this machine has.
    unusable = f"onnxruntime {ort.__version__} cannot use {wanted} on this machine; serve on the CPU"
    if wanted not in ort.get_available_providers():
        raise ValueError(unusable)
    try:
        session = ort.InferenceSession(file, options, providers=_PROVIDERS[device])
    except Exception as error:  # onnxruntime's own exceptions have no common public base
        raise ValueError(
            f"onnxruntime {ort.__version__} cannot run {file}: {error}; the bundle is intact, so try the version "
            "that its manifest names"
        ) from error
    if session.get_providers()[0] != wanted:
        raise ValueError(unusable)
    return session
