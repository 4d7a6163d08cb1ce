"""What torch says about a few hundred real pairs: the side of the parity check that needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from export.parity import BATCH_SIZES, CHUNK
from pipeline.model import DualEncoder
from pipeline.model.tokenizer import CaptionTokenizer
from shards.images import decode_rgb

PAIRS = 256
"""Pairs that are compared, at most: each one is encoded twice on the CPU."""


class Pairs(Protocol):
    """Image-caption pairs by position: a `ShardReader`, or a list of its samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


def write_reference(model: DualEncoder, pairs: Pairs, path: Path) -> None:
    """Write the pairs, and torch's token ids, pixels and embeddings of them, for `export.parity` to compare with.

    The pixels come from open_clip's own transform (torchvision), not from the one that serves.

    Args:
        model: in eval mode.
        pairs: of each the picture and the first caption are taken, of the first `PAIRS` pairs.
        path: an `.npz` file, uncompressed, without pickles.

    Raises:
        ValueError: there is no pair, or one has no caption or no picture that decodes.
    """
    samples = [pairs[i] for i in range(min(len(pairs), PAIRS))]
    if not samples or any(not sample["captions"] for sample in samples):
        raise ValueError("the parity check needs at least one pair, each with a picture and a caption")
    images = [sample["image"] for sample in samples]
    captions = [sample["captions"][0] for sample in samples]
    tokenizer = CaptionTokenizer(model.spec)
    pixels = _pixels(model.spec, images)
    arrays: dict[str, Any] = {
        "image_bytes": np.frombuffer(b"".join(images), np.uint8),
        "image_ends": np.cumsum([len(image) for image in images]),
        "captions": np.frombuffer(json.dumps(captions).encode(), np.uint8),
        "input_ids": tokenizer(captions).numpy(),
        "pixel_values": pixels[:CHUNK].numpy(),
    }
    for size in BATCH_SIZES:
        rows = [i % len(samples) for i in range(size)]
        arrays[f"image_{size}"], arrays[f"text_{size}"] = _encode(
            model, pixels[rows], tokenizer([captions[i] for i in rows])
        )
    chunks = [
        _encode(model, pixels[start : start + CHUNK], tokenizer(captions[start : start + CHUNK]))
        for start in range(0, len(samples), CHUNK)
    ]
    arrays["image_all"], arrays["text_all"] = (np.concatenate(side) for side in zip(*chunks, strict=True))
    np.savez(path, **arrays)


def _pixels(spec: dict[str, Any], images: Sequence[bytes]) -> Tensor:
    transform = image_transform_v2(PreprocessCfg(**spec["preprocess_cfg"]), is_train=False)
    return torch.stack([transform(decode_rgb(image)) for image in images])


def _encode(model: DualEncoder, pixels: Tensor, input_ids: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    with torch.inference_mode():
        features = model(pixel_values=pixels, input_ids=input_ids)
    return features.image_features.numpy(), features.text_features.numpy()
