"""GOAL's boxes: patches against loops and painted rectangles, the boxes that are tried, what is cut out."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.frameworks.goal.boxes import PatchGrid, candidates, cut_out, mean_of, members, patches_in
from pipeline.model.factory import build_from_spec
from pipeline.preprocess import Preprocess
from tests.train.tiny import MODEL


def _by_hand(box: tuple[float, ...], grid: PatchGrid) -> list[bool]:
    """Patch by patch: does it hold a point of the box that counts, across and down?"""

    def axis(low: float, high: float, count: int, side: float) -> list[int]:
        low, high = max(low, 0), min(high, count * side)
        centres = [k for k in range(count) if low <= (k + 0.5) * side < high]
        if centres or low >= high:
            return centres
        middle = (low + high) / 2
        return [k for k in range(count) if k * side <= middle < (k + 1) * side]

    rows = axis(box[1], box[3], grid.rows, grid.height)
    columns = axis(box[0], box[2], grid.columns, grid.width)
    return [row in rows and column in columns for row in range(grid.rows) for column in range(grid.columns)]


@pytest.mark.parametrize("grid", [PatchGrid(4, 4, 8, 8), PatchGrid(3, 5, 7, 4.5), PatchGrid(14, 14, 16, 16)])
def test_patches_of_any_box(grid: PatchGrid) -> None:
    draw = random.Random(0)
    width, height = grid.columns * grid.width, grid.rows * grid.height
    for _ in range(300):
        left, top = draw.uniform(-0.3, 1.1) * width, draw.uniform(-0.3, 1.1) * height
        box = (left, top, left + draw.choice([0.01, 0.2, 0.7]) * width, top + draw.choice([0.01, 0.2, 0.7]) * height)
        found = patches_in(box, grid)
        assert found.tolist() == _by_hand(box, grid)
        seen = box[2] > 0 and box[3] > 0 and left < width and top < height
        assert found.any() == seen


def test_thin_boxes_and_boxes_outside() -> None:
    grid = PatchGrid(2, 2, 10, 10)
    assert patches_in((12, 0, 13, 20), grid).tolist() == [False, True, False, True]  # a line down the right half
    assert patches_in((10, 10, 10.5, 10.5), grid).tolist() == [False, False, False, True]
    assert patches_in((19.5, 3, 40, 3.1), grid).tolist() == [False, True, False, False]
    for outside in ((-9, 2, 0, 8), (20, 2, 30, 8), (2, -5, 8, -1), (2, 21, 8, 30)):
        assert not patches_in(outside, grid).any()


@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
@pytest.mark.parametrize(("side", "patch"), [(32, 8), (48, 12), (50, 8), (224, 14)])
def test_patches_are_those_that_a_painted_rectangle_covers(side: int, patch: int, resize_mode: str) -> None:
    """Whatever the picture's size, the transform and the patch: where a patch's centre is bright, it is in the box."""
    draw = random.Random(side)
    grid = PatchGrid(side // patch, side // patch, patch, patch)
    transform = Preprocess(side, (0.0,) * 3, (1.0,) * 3, "bilinear", resize_mode)
    compared = 0
    for _ in range(20):
        size = draw.randint(40, 400), draw.randint(40, 400)
        left, top = draw.randrange(size[0] // 2), draw.randrange(size[1] // 2)
        box = (left, top, draw.randint(left + 20, size[0]), draw.randint(top + 20, size[1]))
        picture = Image.new("RGB", size)
        picture.paste((255, 255, 255), box)
        pixels = transform(picture)[0]
        seen = transform.box(size, box)
        visible = np.clip(seen, 0, side)
        if min(visible[2] - visible[0], visible[3] - visible[1]) < patch:
            continue  # too thin to hold a centre in every direction
        inside = patches_in(seen, grid).reshape(grid.rows, grid.columns)
        for row in range(grid.rows):
            for column in range(grid.columns):
                y, x = row * patch + patch // 2, column * patch + patch // 2
                bright = pixels[y - 1 : y + 1, x - 1 : x + 1]
                if bright.min() == bright.max():  # no edge of the rectangle within a pixel of the centre
                    compared += 1
                    assert inside[row, column] == (bright[0, 0] > 0.5)
    assert compared > 60


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        ({}, PatchGrid(4, 4, 8, 8)),
        ({"image_size": 36, "patch_size": 8}, PatchGrid(4, 4, 8, 8)),  # 4 pixels are in no patch
        ({"timm_model_name": "test_vit", "image_size": 160}, PatchGrid(10, 10, 16, 16)),
        ({"timm_model_name": "resnet18", "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}, None),
    ],
)
def test_the_grid_is_the_towers(vision: dict[str, Any], expected: PatchGrid | None) -> None:
    spec = copy.deepcopy(MODEL)
    if "timm_model_name" in vision:
        spec["model_cfg"]["vision_cfg"] = {}  # type: ignore[index]
    spec["model_cfg"]["vision_cfg"].update(vision)  # type: ignore[index]
    tower: Any = build_from_spec(spec).clip.visual
    size = vision.get("image_size", 32)
    assert PatchGrid.of(tower, size) == (expected or PatchGrid(2, 2, 32, 32))


def test_a_grid_does_not_change_the_tower() -> None:
    tower: Any = build_from_spec(MODEL).clip.visual.train()  # type: ignore[union-attr]
    PatchGrid.of(tower, 32)
    assert tower.training


def test_the_boxes_that_are_tried() -> None:
    grid = PatchGrid(4, 4, 8, 8)
    found = candidates(grid, [0.5, 0.75, 1.0])
    halves = {(left, top, left + 2, top + 2) for left in range(3) for top in range(3)}
    three_quarters = {(left, top, left + 3, top + 3) for left in range(2) for top in range(2)}
    assert len(found) == 13
    assert set(map(tuple, found.tolist())) == halves | three_quarters
    inside = members(found, grid)
    for box, patches in zip(found.tolist(), inside, strict=True):
        assert patches.tolist() == patches_in([edge * 8 for edge in box], grid).tolist()


@pytest.mark.parametrize("grid", [PatchGrid(14, 14, 16, 16), PatchGrid(7, 5, 8, 8), PatchGrid(2, 2, 8, 8)])
def test_boxes_of_every_size_reach_all_patches(grid: PatchGrid) -> None:
    for scale in (0.25, 0.35, 0.5, 0.7):
        boxes = candidates(grid, [scale])
        assert members(boxes, grid).any(0).all()
        assert len(set(map(tuple, boxes.tolist()))) == len(boxes)


def test_no_boxes_to_try_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no box can be proposed on 1 x 1 patches at scales .* framework\.scales"):
        candidates(PatchGrid(1, 1, 32, 32), (0.25, 0.5))


def test_means_of_tokens() -> None:
    tokens = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [8.0, 1.0]], [[5.0, 0.0], [1.0, 1.0], [0.0, 4.0]]])
    chosen = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    expected = [[[2.0, 4.0], [0.0, 0.0], [4.5, 1.5]], [[3.0, 0.5], [0.0, 0.0], [2.5, 2.0]]]
    assert mean_of(tokens, chosen).tolist() == expected
    assert mean_of(tokens.bfloat16(), chosen).dtype == torch.bfloat16


def test_what_is_cut_out_of_a_ramp_and_of_a_picture() -> None:
    """A ramp keeps its values at the places that are asked for; a photograph is what Pillow's resize makes of it."""
    y, x = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    ramp = torch.stack([x, y, x + y])[None]
    cut = cut_out(ramp, torch.tensor([[0.25, 0.5, 0.75, 0.9]]), 4)[0]
    across, down = (10 + (np.arange(4) + 0.5) * 5 - 0.5), (20 + (np.arange(4) + 0.5) * 4 - 0.5)
    np.testing.assert_allclose(cut[0].numpy(), np.tile(across, (4, 1)), atol=1e-4)
    np.testing.assert_allclose(cut[1].numpy(), np.tile(down[:, None], (1, 4)), atol=1e-4)
    noise = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((96, 96), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
    for box in ((8, 16, 72, 80), (0, 0, 24, 24)):
        cut = cut_out(pixels[None], torch.tensor([box]) / 96, 32)[0]
        pillow = np.asarray(picture.crop(box).resize((32, 32), Image.Resampling.BILINEAR), float).transpose(2, 0, 1)
        assert np.abs(cut.numpy() - pillow)[:, 1:-1, 1:-1].max() < 6
