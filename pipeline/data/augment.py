"""Random crops and mirrored pictures for training, the same for a picture in an epoch wherever it is read."""

from __future__ import annotations

import math
import random

from PIL import Image

from pipeline.sections import AugmentConfig

_TRIES = 10


class Augment:
    """Changes an RGB picture at random, by (seed, epoch, id) alone.

    Args:
        config: what is done.
        seed: of the run.
    """

    def __init__(self, config: AugmentConfig, seed: int) -> None:
        self.config = config
        self.seed = seed

    def __call__(self, image: Image.Image, sample_id: str, epoch: int) -> Image.Image:
        """A crop of the picture, possibly mirrored; the picture itself where nothing is asked for."""
        draw = random.Random(f"augment/{self.seed}/{epoch}/{sample_id}")
        if self.config.crop_scale is not None:
            image = image.crop(self.box(image.size, draw))
        if draw.random() < self.config.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image

    def box(self, size: tuple[int, int], draw: random.Random) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of a crop: an even share of the area and an even logarithm of the change of ratio.

        As in torchvision's RandomResizedCrop, but relative to the picture's own ratio, so that nothing is squeezed
        more than `crop_ratio` says.
        """
        assert self.config.crop_scale is not None
        width, height = size
        for _ in range(_TRIES):
            share = draw.uniform(*self.config.crop_scale)
            ratio = math.exp(draw.uniform(-1, 1) * math.log(self.config.crop_ratio))
            w = round(width * math.sqrt(share * ratio))
            h = round(height * math.sqrt(share / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = draw.randint(0, width - w), draw.randint(0, height - h)
                return left, top, left + w, top + h
        return 0, 0, width, height
