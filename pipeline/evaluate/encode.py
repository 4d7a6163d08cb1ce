"""Embeddings of a whole split, on one process or shared among ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.preprocess import Preprocess
from shards.reader import ShardReader


class Encoder(Protocol):
    """Anything that encodes. Both methods return float32 [B, D], L2-normalised."""

    def encode_images(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """Encoded pictures, as they lie in the shards."""

    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """Captions, as they lie in the shards."""


class Sharing(Protocol):
    """How ranks share an evaluation; `pipeline.train.distributed.Ranks` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank."""


@dataclass(frozen=True)
class Embeddings:
    """A split, encoded. image_embeds [N, D], text_embeds [M, D], owner [M]: the row of each caption's image."""

    ids: list[str]
    image_embeds: NDArray[np.float32]
    text_embeds: NDArray[np.float32]
    owner: NDArray[np.int64]


class TorchEncoder:
    """A torch dual encoder as an `Encoder`.

    Args:
        forward: the module, or the DeepSpeed engine around it; called with `pixel_values` or `input_ids`.
        preprocess, tokenizer: as the model needs them.
        device: where the module lives.
        dtype: of the pixels, the module's own.
    """

    def __init__(
        self, forward: Any, preprocess: Preprocess, tokenizer: Any, device: Any = "cpu", dtype: Any = None
    ) -> None:
        self.forward = forward
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.device = device
        self.dtype = dtype
        self._decoders = ThreadPoolExecutor(4)  # Pillow lets go of the GIL while it decodes and resizes

    def encode_images(self, images: Sequence[bytes]) -> NDArray[np.float32]:
        """See `Encoder`."""
        import torch

        pixels = torch.from_numpy(np.stack(list(self._decoders.map(self.preprocess.from_bytes, images))))
        with torch.inference_mode():
            features = self.forward(pixel_values=pixels.to(self.device, self.dtype)).image_features
        return np.asarray(features.float().cpu().numpy())

    def encode_texts(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """See `Encoder`."""
        import torch

        with torch.inference_mode():
            features = self.forward(input_ids=self.tokenizer(captions).to(self.device)).text_features
        return np.asarray(features.float().cpu().numpy())


def encode_split(
    encoder: Encoder,
    reader: ShardReader,
    batch_size: int,
    sharing: Sharing | None = None,
    progress: Callable[[int], None] | None = None,
) -> Embeddings:
    """Encode every image and caption of a split.

    Each rank encodes every world_size-th sample; all make the same number of forward calls (under ZeRO-3 a call is
    collective), those with less to do repeat their last one. The result is the same on every rank, and for any
    number of ranks.

    Args:
        encoder: what encodes.
        reader: the split.
        batch_size: samples per call.
        sharing: the ranks; None is one process.
        progress: called with the number of images done by this rank.
    """
    rank, world = (sharing.rank, sharing.world_size) if sharing else (0, 1)
    share = math.ceil(len(reader) / world)
    mine = list(range(rank, len(reader), world))
    images, captions, caption_rows, ids = [], [], [], []
    for start in range(0, share, batch_size):
        rows = mine[start : start + batch_size]
        samples = [reader[i] for i in rows or mine[-1:] or [0]]
        embeds = encoder.encode_images([sample["image"] for sample in samples])
        images.append(embeds[: len(rows)])
        for row, sample in zip(rows, samples, strict=False):
            ids.append(sample["id"])
            captions.extend(sample["captions"])
            caption_rows.extend([row] * len(sample["captions"]))
        if progress:
            progress(len(ids))
    calls = math.ceil(len(captions) / batch_size)
    calls = max(sharing.gather(calls)) if sharing else calls
    texts = []
    for call in range(calls):
        chunk = captions[call * batch_size : (call + 1) * batch_size]
        embeds = encoder.encode_texts(chunk or captions[-1:] or [""])
        texts.append(embeds[: len(chunk)])
    part = (mine, ids, np.concatenate(images), np.concatenate(texts), np.asarray(caption_rows, np.int64))
    return _merge(sharing.gather(part) if sharing else [part])


def _merge(parts: list[Any]) -> Embeddings:
    """The ranks' parts in the order of the split."""
    rows, ids, images, texts, caption_rows = (
        [row for part in parts for row in part[0]],
        [i for part in parts for i in part[1]],
        *(np.concatenate([part[k] for part in parts]) for k in (2, 3, 4)),
    )
    order = np.argsort(rows)
    caption_order = np.argsort(caption_rows, kind="stable")
    return Embeddings([ids[i] for i in order], images[order], texts[caption_order], caption_rows[caption_order])
