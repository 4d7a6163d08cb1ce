"""A strength that changes in the course of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda fraction: fraction,
    "cosine": lambda fraction: (1 - math.cos(math.pi * fraction)) / 2,
}


@dataclass(frozen=True)
class GammaSchedule:
    """From `start` to `end` over the run: `start + (end - start) shape(fraction)`; without a shape, always `end`.

    Attributes:
        end: the value at the end of training; any sign.
        start: the value at its beginning.
        shape: `linear`, `cosine` (half a wave: slow, fast, slow), or None for a constant.

    Raises:
        ValueError: a value is not finite, the shape is unknown, or there is a start without a shape.
    """

    end: float
    start: float | None = None
    shape: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.end):
            raise ValueError(f"gamma must be a finite number, not {self.end}")
        if self.start is not None and not math.isfinite(self.start):
            raise ValueError(f"gamma_start must be a finite number, not {self.start}")
        if self.shape is not None and self.shape not in SHAPES:
            raise ValueError(f"gamma_schedule must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.start is not None and self.shape is None:
            raise ValueError(f"gamma_start needs a gamma_schedule: {', '.join(SHAPES)}")

    def at(self, fraction: float) -> float:
        """The value when so much of the training is done; 0 at its first step."""
        if self.shape is None:
            return float(self.end)
        start = 0.0 if self.start is None else self.start
        return start + (self.end - start) * SHAPES[self.shape](min(max(fraction, 0.0), 1.0))
