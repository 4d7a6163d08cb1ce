"""Edge maps of pictures, by OpenCV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Responses below the first are no edge; Canny follows a line as far as that, and begins one at the second. The others
# grow from black to white in between. An edge answers the second derivative of `log` a third as loudly as the first.
THRESHOLDS = {"canny": (100.0, 200.0), "sobel": (50.0, 300.0), "log": (15.0, 90.0)}

cv2.setNumThreads(0)  # a loader has a process per core already


@dataclass(frozen=True)
class EdgeOperator:
    """Edges as light on dark.

    Args:
        name: `canny` gives lines; `sobel`, the size of the gradient, and `log`, that of the Laplacian of a Gaussian,
            give grey.
        thresholds: of the response of a 3 x 3 filter to grey values of 0 to 255.
        sigma: of the Gaussian before the operator, pixels; 0 leaves it out.
    """

    name: str
    thresholds: tuple[float, float]
    sigma: float

    def __call__(self, picture: Image.Image) -> NDArray[np.uint8]:
        """A picture to uint8 [height, width]; all zeros where it has no edge."""
        grey: Any = np.asarray(picture.convert("L"))
        if self.name != "canny":
            grey = grey.astype(np.float32)
        if self.sigma:
            grey = cv2.GaussianBlur(grey, (0, 0), self.sigma)
        low, high = self.thresholds
        if self.name == "canny":
            return np.asarray(cv2.Canny(grey, low, high, L2gradient=True), np.uint8)
        if self.name == "sobel":
            response: Any = cv2.magnitude(cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1))
        else:
            response = np.abs(cv2.Laplacian(grey, cv2.CV_32F, ksize=3))
        return (np.clip((response - low) / (high - low), 0, 1) * 255).astype(np.uint8)
