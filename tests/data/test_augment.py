"""Random crops and mirrored pictures: within the stated bounds, and the same for a picture in an epoch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.config import load_recipe
from pipeline.data.augment import Augment
from pipeline.sections import AugmentConfig
from tests.data.reading import PREPROCESS, Utf8
from tests.ranks import Ranks

PICTURE = Image.fromarray(np.arange(60 * 90 * 3, dtype=np.uint32).astype(np.uint8).reshape(60, 90, 3))


def test_crops_have_the_stated_area_and_ratio() -> None:
    augment = Augment(AugmentConfig(crop_scale=(0.3, 0.6), crop_ratio=1.5), seed=1)
    draw = random.Random(0)
    shares = []
    for _ in range(500):
        left, top, right, bottom = augment.box((900, 600), draw)
        assert 0 <= left < right <= 900
        assert 0 <= top < bottom <= 600
        shares.append((right - left) * (bottom - top) / 540_000)
        assert 1 / 1.51 < (right - left) / (bottom - top) / 1.5 < 1.51
    assert 0.295 < min(shares) < 0.33
    assert 0.57 < max(shares) < 0.605


def test_a_picture_in_an_epoch_is_always_changed_alike() -> None:
    config = AugmentConfig(crop_scale=(0.2, 0.9), flip=0.5)
    first = [np.asarray(Augment(config, 7)(PICTURE, f"id{i}", e)).tobytes() for i in range(5) for e in range(3)]
    again = [np.asarray(Augment(config, 7)(PICTURE, f"id{i}", e)).tobytes() for i in range(5) for e in range(3)]
    assert first == again
    assert len(set(first)) == 15
    assert np.asarray(Augment(config, 8)(PICTURE, "id0", 0)).tobytes() != first[0]


def test_flip_mirrors_about_the_stated_share() -> None:
    mirrored = np.asarray(PICTURE)[:, ::-1]
    augment = Augment(AugmentConfig(flip=0.25), 0)
    flips = [np.array_equal(np.asarray(augment(PICTURE, str(i), 0)), mirrored) for i in range(400)]
    assert 70 <= sum(flips) <= 130


def test_nothing_is_changed_by_default() -> None:
    assert Augment(AugmentConfig(), 0)(PICTURE, "a", 0) is PICTURE


@pytest.mark.parametrize("scale", ["[0,1]", "[0.5,0.2]", "[0.5,1.5]"])
def test_a_share_that_is_none_is_refused(scale: str) -> None:
    with pytest.raises(ValueError, match=r"crop_scale is two shares of the area"):
        load_recipe("hn", [f"data.augment.crop_scale={scale}"])


def _pixels(split: Path, batch_size: int, workers: int) -> dict[str, bytes]:
    """The pixels of every pair of an epoch on this rank, by id."""
    import torch.distributed as dist

    from pipeline.data import TrainingData
    from tests.data.reading import _like_a_launchers_rank

    with _like_a_launchers_rank():
        data = TrainingData(
            split,
            PREPROCESS,
            Utf8(),  # type: ignore[arg-type]
            batch_size=batch_size,
            world_size=dist.get_world_size(),
            workers=workers,
            seed=3,
            augment=AugmentConfig(crop_scale=(0.2, 0.9), flip=0.5),
        )
        found = {}
        for batch in data.epoch(1):
            found.update({i: p.numpy().tobytes() for i, p in zip(batch["ids"], batch["pixel_values"], strict=True)})
        return found


def test_ranks_and_workers_change_nothing(ranks: Ranks, tiny_set: Path) -> None:
    (alone,) = ranks(1).run(_pixels, tiny_set / "train", 8, 0)
    first, second = ranks(2).run(_pixels, tiny_set / "train", 4, 2)
    assert len(alone) == 64
    assert first | second == alone
