"""Exact retrieval metrics from embeddings, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECALL_AT = (1, 5, 10)
_CHUNK = 2048


def retrieval_metrics(
    image_embeds: NDArray[np.float32],
    text_embeds: NDArray[np.float32],
    owner: NDArray[np.int64],
    recall_at: Sequence[int] = RECALL_AT,
) -> dict[str, Any]:
    """Recall@K in percent and median rank, text to image and image to text.

    Text to image: the rank of a caption's own image among all images. Image to text: the best rank of an image's own
    captions among all captions of other images. A tie counts against the model: every wrong candidate that scores as
    high as the right one stands before it, so that embeddings that collapse to a point score 0.

    Args:
        image_embeds: [N, D], L2-normalised.
        text_embeds: [M, D], L2-normalised; M >= N, every image has at least one caption.
        owner: [M], the row of each caption's image.
        recall_at: the Ks.

    Returns:
        {"images": N, "captions": M, "t2i": {"1": ..., "median_rank": ...}, "i2t": {...}}
    """
    if len(np.unique(owner)) != len(image_embeds):
        raise ValueError(f"{len(image_embeds)} images, but captions belong to {len(np.unique(owner))}")
    return {
        "images": len(image_embeds),
        "captions": len(text_embeds),
        "t2i": summary(_text_to_image_ranks(image_embeds, text_embeds, owner), recall_at),
        "i2t": summary(_image_to_text_ranks(image_embeds, text_embeds, owner), recall_at),
    }


def _text_to_image_ranks(
    image_embeds: NDArray[np.float32], text_embeds: NDArray[np.float32], owner: NDArray[np.int64]
) -> NDArray[np.int64]:
    ranks, gallery = [], image_embeds.astype(np.float64)
    for start in range(0, len(text_embeds), _CHUNK):
        own = owner[start : start + _CHUNK]
        scores = inner_products(text_embeds[start : start + _CHUNK], gallery)  # [chunk, N]
        right = scores[np.arange(len(own)), own][:, None]
        ranks.append((scores >= right).sum(axis=1))  # counts the right one itself, so the first rank is 1
    return np.concatenate(ranks)


def _image_to_text_ranks(
    image_embeds: NDArray[np.float32], text_embeds: NDArray[np.float32], owner: NDArray[np.int64]
) -> NDArray[np.int64]:
    ranks, gallery = [], text_embeds.astype(np.float64)
    for start in range(0, len(image_embeds), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(image_embeds)))
        scores = inner_products(image_embeds[rows], gallery)  # [chunk, M]
        own = owner[None, :] == rows[:, None]
        right = np.where(own, scores, -np.inf).max(axis=1, keepdims=True)
        ranks.append((~own & (scores >= right)).sum(axis=1) + 1)
    return np.concatenate(ranks)


def inner_products(queries: NDArray[np.float32], gallery: NDArray[np.float64]) -> NDArray[np.float32]:
    """Inner products, summed in float64, rounded once: float32 kernels give equal pairs unequal sums at their edges."""
    return (queries.astype(np.float64) @ gallery.T).astype(np.float32)


def summary(ranks: NDArray[np.int64], recall_at: Sequence[int]) -> dict[str, float]:
    """Recall@K in percent and the median of ranks that count from 1."""
    recalls = {str(k): float((ranks <= k).mean() * 100) for k in recall_at}
    return {**recalls, "median_rank": float(np.median(ranks))}
