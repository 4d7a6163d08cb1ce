"""What a framework reads of a pair beside picture and caption."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.sections import AugmentConfig


class Views:
    """What a framework reads of a pair beside the picture and the caption; works in the loader's processes."""

    def check(self, augment: AugmentConfig) -> None:
        """Refuse an augmentation that these views cannot follow; by default they follow any.

        Raises:
            ValueError: says why, and what to do.
        """

    def of_pair(self, sample: dict[str, Any], image: Image.Image, caption: str, draw: random.Random) -> dict[str, Any]:
        """The views of one pair.

        Args:
            sample: as the shards have it: `id`, `image` (bytes), `captions`, `meta`.
            image: the picture in RGB, before the model's transform.
            caption: the one that was drawn.
            draw: seeded by (seed, epoch, id); whatever is drawn comes from it.
        """
        raise NotImplementedError

    def collate(self, pairs: Sequence[dict[str, Any]], tokenizer: CaptionTokenizer) -> dict[str, Tensor]:
        """The views of the pairs of a batch as tensors, which the forward pass gets as `extras`."""
        raise NotImplementedError
