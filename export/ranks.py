"""Do two sets of embeddings rank the same candidates first? No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TOP_K = 10

Sides = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Image embeddings [N, D] and text embeddings [N, D]."""


def compare_ranks(reference: Sides, served: Sides, tie: float) -> dict[str, dict[str, Any]]:
    """The first `TOP_K` candidates of every query, text to image and image to text.

    Args:
        reference, served: embeddings of the same pairs.
        tie: two candidates whose reference scores differ by no more are tied, and may stand in either order.

    Returns:
        For `t2i` and `i2t`: the number of queries, of those equal in every place, equal up to ties, and different.
    """
    # In float64: here the embeddings are compared, not the rounding of a matrix product.
    expected, actual = (text.astype(np.float64) @ image.astype(np.float64).T for image, text in (reference, served))
    return {"t2i": _compare(expected, actual, tie), "i2t": _compare(expected.T, actual.T, tie)}


def _compare(expected: NDArray[np.float64], actual: NDArray[np.float64], tie: float) -> dict[str, Any]:
    """Scores [queries, candidates] of the reference and of what serves."""
    first_expected, first_actual = (
        np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K] for scores in (expected, actual)
    )
    gaps = np.abs(
        np.take_along_axis(expected, first_expected, axis=1) - np.take_along_axis(expected, first_actual, axis=1)
    )
    equal = (first_expected == first_actual).all(axis=1)
    agree = (gaps <= tie).all(axis=1)
    return {
        "queries": len(expected),
        "equal": int(equal.sum()),
        "tied": int((agree & ~equal).sum()),
        "different": int((~agree).sum()),
    }
