"""Where the local edge maps of a picture are taken: the boxes of the shards, then those with the most edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.frameworks.goal.boxes import PatchGrid, candidates
from pipeline.frameworks.goal.views import Region
from pipeline.preprocess import Preprocess

Box = tuple[int, int, int, int]
MOST_OVERLAP = 0.3  # intersection over union of two proposed boxes: they are to show different things


def squares(size: int, scales: Sequence[float]) -> NDArray[np.int64]:
    """Boxes to try on a map of `size` x `size`, int64 [N, 4]: of several sizes, half a side apart.

    Raises:
        ValueError: the scales leave none.
    """
    return candidates(PatchGrid(size, size, 1.0, 1.0), scales).numpy()


def with_most_edges(edges: NDArray[np.uint8], boxes: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Up to `count` of the boxes, those of the most edges per area first, that overlap little and are not empty."""
    total = cv2.integral(edges)  # of the rows above and the columns to the left of a corner
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top)
    density = (total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]) / area
    chosen: list[int] = []
    for number in np.argsort(-density, kind="stable"):
        if len(chosen) == count or density[number] == 0:
            break
        if all(_overlap(boxes[number], boxes[other]) <= MOST_OVERLAP for other in chosen):
            chosen.append(int(number))
    return [boxes[number] for number in chosen]


def _overlap(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(np.prod(sides.clip(min=0)))
    return shared / (float(np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2])) - shared)


def in_picture(box: Iterable[float], picture: tuple[int, int], preprocess: Preprocess) -> Box:
    """A box of the model's input, in whole pixels of a picture of that width and height, inside it."""
    whole = preprocess.box(picture, (0, 0, *picture))
    edges = []
    for place, edge in enumerate(box):
        axis = place % 2
        share = (edge - whole[axis]) / (whole[axis + 2] - whole[axis])
        edges.append(min(max(round(share * picture[axis]), 0), picture[axis]))
    left, top, right, bottom = edges
    left, top = min(left, picture[0] - 1), min(top, picture[1] - 1)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def most_similar(regions: Sequence[Region], count: int) -> list[Box]:
    """The boxes of the regions most similar to their captions; of unknown similarity last, and no box twice."""
    known = {region.box: region for region in reversed(regions)}  # the first of equal ones stays
    ordered = [region for region in regions if known[region.box] is region]
    ordered.sort(key=lambda region: -np.inf if region.similarity is None else region.similarity, reverse=True)
    return [region.box for region in ordered[:count]]
