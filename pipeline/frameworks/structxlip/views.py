"""What StructXLIP reads of a pair, made in the loader: edge maps, and the caption's structure in words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pipeline.data.views import Views
from pipeline.frameworks.goal.views import regions_of
from pipeline.frameworks.structxlip.boxes import Box, in_picture, most_similar, with_most_edges
from pipeline.frameworks.structxlip.edges import EdgeOperator
from pipeline.frameworks.structxlip.filters import CaptionFilter
from pipeline.frameworks.structxlip.windows import WordTokens, token_windows, windows
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.sections import AugmentConfig


class StructureViews(Views):
    """Edge maps of a picture and of parts of it, the filtered caption and its windows of words.

    Args:
        preprocess: the image transform.
        operator: makes the maps, of what the model sees.
        caption_filter: leaves the structure of a caption.
        word_tokens: of the model's tokenizer.
        window: words of a window, words between two, and windows of a caption.
        from_shards: take boxes from `meta["regions"]`, where a pair has some.
        num_crops: local maps of a pair; 0 for none, and no windows then.
        tried: boxes of the model's input to propose, int64 [N, 4].
    """

    def __init__(
        self,
        preprocess: Preprocess,
        operator: EdgeOperator,
        caption_filter: CaptionFilter,
        word_tokens: WordTokens,
        *,
        window: tuple[int, int, int],
        from_shards: bool,
        num_crops: int,
        tried: NDArray[np.int64],
    ) -> None:
        self.preprocess = preprocess
        self.operator = operator
        self.caption_filter = caption_filter
        self.word_tokens = word_tokens
        self.window = window
        self.from_shards = from_shards
        self.num_crops = num_crops
        self.tried = tried

    def check(self, augment: AugmentConfig) -> None:
        """See `Views.check`."""
        if self.num_crops and self.from_shards and (augment.crop_scale is not None or augment.flip):
            raise ValueError(
                "data.augment moves what the boxes of the shards point at: leave it out, or set "
                "framework.boxes: proposed"
            )

    def of_pair(self, sample: dict[str, Any], image: Image.Image, caption: str, draw: random.Random) -> dict[str, Any]:
        """See `Views.of_pair`. `structure`: the filtered caption. `edges`: uint8 [1 + K, H, W], the whole one first."""
        whole = self._edges(image)
        edges = np.zeros((1 + self.num_crops, *whole.shape), np.uint8)
        edges[0] = whole
        for number, box in enumerate(self._boxes(sample, image, whole), 1):
            edges[number] = self._edges(image.crop(box))
        return {"structure": self.caption_filter(caption), "edges": torch.from_numpy(edges)}

    def _edges(self, image: Image.Image) -> NDArray[np.uint8]:
        return self.operator(self.preprocess.fit(image, reducing_gap=1.0))

    def _boxes(self, sample: dict[str, Any], image: Image.Image, whole: NDArray[np.uint8]) -> list[Box]:
        """Where local maps are taken: boxes of the shards, and others proposed where they are too few."""
        if not self.num_crops:
            return []
        regions = regions_of(sample["meta"], image.size) if self.from_shards else []
        boxes = most_similar(regions, self.num_crops)
        proposed = with_most_edges(whole, self.tried, self.num_crops - len(boxes))
        return boxes + [in_picture(box, image.size, self.preprocess) for box in proposed]

    def collate(self, pairs: Sequence[dict[str, Any]], tokenizer: CaptionTokenizer) -> dict[str, Tensor]:
        """The views of a batch.

        Returns:
            structure_ids: int64 [B, L], of the filtered captions. edges: uint8 [B, 1 + K, H, W]; zeros where there is
            no edge, or no box left. spans, with local maps: int64 [B, S, 2], windows of words, see `token_windows`.
        """
        captions = [pair["structure"] for pair in pairs]
        views = {"edges": torch.stack([pair["edges"] for pair in pairs])}
        if not self.num_crops:
            return views | {"structure_ids": tokenizer(captions)}
        ids, places = self.word_tokens.of(captions, tokenizer)
        spans = token_windows([windows(caption.split(), *self.window) for caption in captions], places)
        return views | {"structure_ids": ids, "spans": spans}
