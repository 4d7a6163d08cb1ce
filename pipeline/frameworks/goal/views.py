"""Local pairs in the loader: a sentence of the caption, and the part of the picture that it describes where known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.data.captions import split_sentences
from pipeline.data.views import Views
from pipeline.frameworks.goal.boxes import PatchGrid, patches_in
from pipeline.frameworks.goal.spans import place_in, token_spans
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords
from pipeline.preprocess import Preprocess
from pipeline.sections import AugmentConfig


class Region(NamedTuple):
    """A part of a picture with a caption of its own: left, top, right, bottom in whole pixels, inside the picture."""

    caption: str
    box: tuple[int, int, int, int]
    similarity: float | None


@dataclass(frozen=True)
class LocalPairs(Views):
    """One local pair of each pair.

    Args:
        preprocess: the image transform.
        grid: the image tower's.
        no_words: the tokenizer's.
        from_shards: take boxes and captions from `meta["regions"]`, where a pair has some.
        region: which of them, `best` or `random`.
        copy: side of the picture that proposed boxes are cut out of, in sides of the model's input; 1 is that itself.
    """

    preprocess: Preprocess
    grid: PatchGrid
    no_words: NoWords
    from_shards: bool
    region: str
    copy: float

    def check(self, augment: AugmentConfig) -> None:
        """See `Views.check`."""
        if self.from_shards and (augment.crop_scale is not None or augment.flip):
            raise ValueError(
                "data.augment moves what the boxes of the shards point at: leave it out, or set "
                "framework.boxes: proposed"
            )

    def of_pair(self, sample: dict[str, Any], image: Image.Image, caption: str, draw: random.Random) -> dict[str, Any]:
        """See `Views.of_pair`. A region of the shards; else a sentence, whose box the model will propose."""
        regions = regions_of(sample["meta"], image.size) if self.from_shards else []
        if regions:
            region = choose(regions, self.region, draw)
            place = place_in(caption, region.caption)
            known = {
                "crop": torch.from_numpy(self.preprocess(image.crop(region.box))),
                "patches": torch.from_numpy(patches_in(self.preprocess.box(image.size, region.box), self.grid)),
            }
            return {"caption": caption, "place": place, "sentence": region.caption, **known}
        place = draw.choice(sentence_places(caption))
        pair: dict[str, Any] = {"caption": caption, "place": place, "sentence": caption[slice(*place)]}
        if self.copy > 1:
            larger = replace(self.preprocess, size=round(self.preprocess.size * self.copy))
            pair["picture"] = torch.from_numpy(np.array(larger.fit(image, reducing_gap=1.0)).transpose(2, 0, 1))
        return pair

    def collate(self, pairs: Sequence[dict[str, Any]], tokenizer: CaptionTokenizer) -> dict[str, Tensor]:
        """The local pairs of a batch.

        Returns:
            sentence_ids: int64 [B, l]. span: bool [B, L], the sentence's tokens in the caption.
            crops: float32 [B, 3, H, W] and patches: bool [B, P], those in the box, where some pair has a region.
            proposed: bool [B], pairs without, where there are such; and pictures: uint8 [B, 3, R, R], their larger
            copies. What a pair lacks is zeros.
        """
        spans = token_spans([p["caption"] for p in pairs], [p["place"] for p in pairs], tokenizer, self.no_words)
        views = {"sentence_ids": tokenizer([pair["sentence"] for pair in pairs]), "span": spans}
        proposed = torch.tensor(["crop" not in pair for pair in pairs])
        if proposed.any():
            views["proposed"] = proposed
        for name, plural in (("crop", "crops"), ("patches", "patches"), ("picture", "pictures")):
            found = next((pair[name] for pair in pairs if name in pair), None)
            if found is not None:
                views[plural] = torch.stack([pair.get(name, torch.zeros_like(found)) for pair in pairs])
        return views


def regions_of(meta: Mapping[str, Any] | None, size: tuple[int, int]) -> list[Region]:
    """The regions of a pair that have words and share something with the picture of that width and height.

    Boxes are in pixels (`box`), or in shares of width and height (`relative_box`); both become the whole pixels that
    they touch, inside the picture.
    """
    regions = []
    for region in (meta or {}).get("regions") or ():
        shares = region.get("relative_box")
        edges = region.get("box") or (shares and [e * size[k % 2] for k, e in enumerate(shares)])
        if not edges or not (region.get("caption") or "").strip():
            continue
        left, top = (max(0, math.floor(edge)) for edge in edges[:2])
        right, bottom = (min(side, math.ceil(edge)) for side, edge in zip(size, edges[2:], strict=True))
        if left < right and top < bottom:
            regions.append(Region(region["caption"], (left, top, right, bottom), region.get("similarity_score")))
    return regions


def choose(regions: Sequence[Region], how: str, draw: random.Random) -> Region:
    """The region most similar to its caption (`best`), or any; any as well where no similarity is known."""
    scored = [region for region in regions if region.similarity is not None]
    if how == "best" and scored:
        return max(scored, key=lambda region: region.similarity or 0.0)
    return draw.choice(regions)


def sentence_places(caption: str) -> list[tuple[int, int]]:
    """First and one past the last character of every sentence that has a letter or digit, or of all there are."""
    places, start = [], 0
    for sentence in split_sentences(caption):
        start = caption.index(sentence, start)
        places.append((start, start + len(sentence)))
        start += len(sentence)
    return [place for place in places if any(map(str.isalnum, caption[slice(*place)]))] or places
