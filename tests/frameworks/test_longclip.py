"""Long-CLIP: the short branch against float64, on any number of ranks, and a training with it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from pipeline.frameworks import make_framework
from pipeline.frameworks.longclip import FirstSentence, main_components, stack_texts
from pipeline.model import Features
from tests.ranks import Ranks
from tests.train.tiny import losses_of, steps_of, train_on_rank, write_recipe


def _rows(n: int, dim: int, seed: int) -> torch.Tensor:
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def _pca(rows: np.ndarray, components: int) -> np.ndarray:
    """By the eigenvectors of the covariance."""
    mean = rows.mean(axis=0)
    centred = rows - mean
    _, vectors = np.linalg.eigh(centred.T @ centred)
    basis = vectors[:, -components:]
    reconstructed: np.ndarray = centred @ basis @ basis.T + mean
    return reconstructed


@pytest.mark.parametrize("components", [1, 3, 6, 50])
def test_main_components_are_those_of_the_covariance(components: int) -> None:
    rows = _rows(12, 8, 0)
    found = main_components(rows, components)
    np.testing.assert_allclose(found.numpy(), _pca(rows.numpy(), min(components, 8)), atol=1e-6)


def _short_loss(world: int, seed: int) -> tuple[float, list[list[float]]]:
    """The value, and the gradient of the image features of this rank over the number of ranks."""
    n = 12 // world
    rank = dist.get_rank()
    images = _rows(12, 8, seed).float()[rank * n : (rank + 1) * n].requires_grad_()
    short = _rows(12, 8, seed + 1).float()[rank * n : (rank + 1) * n]
    framework = make_framework("longclip", {"components": 3}, _Model())  # type: ignore[arg-type]
    features = Features(images, None, torch.tensor([10.0]), further={"short_features": short})
    loss = framework.terms(features, torch.arange(rank * n, (rank + 1) * n))["short"]
    (gradient,) = torch.autograd.grad(loss, images)
    return loss.item(), (gradient / world).tolist()


class _Model:
    pad_id = 0


def _expected(seed: int) -> float:
    """InfoNCE with label smoothing 0.1 between reconstructed images and short captions, in float64."""
    images, short = (
        _pca(_rows(12, 8, seed).float().double().numpy(), 3),
        _rows(12, 8, seed + 1).float().double().numpy(),
    )
    total = 0.0
    for logits in (10 * images @ short.T, 10 * short @ images.T):
        for i, row in enumerate(logits):
            log_p = row - np.log(np.exp(row).sum())
            target = np.full(12, 0.1 / 12)
            target[i] += 0.9
            total -= float(target @ log_p) / 24
    return total


def test_the_short_term_on_any_number_of_ranks(ranks: Ranks) -> None:
    found = {world: ranks(world).run(_short_loss, world, 5) for world in (1, 2, 4)}
    whole = found[1][0][1]
    for world, outcome in found.items():
        assert [value for value, _ in outcome] == pytest.approx([_expected(5)] * world, rel=1e-5)
        gradients = [row for _, part in outcome for row in part]
        np.testing.assert_allclose(gradients, whole, atol=1e-6)


def test_the_mean_of_all_has_the_gradient_of_the_whole_batch() -> None:
    """With every component kept, the reconstruction is the rows themselves, and so is its gradient."""
    rows = _rows(6, 4, 1).float().requires_grad_()
    weights = _rows(6, 4, 2).float()
    (gradient,) = torch.autograd.grad((main_components(rows, 4) * weights).sum(), rows)
    np.testing.assert_allclose(gradient.numpy(), weights.numpy(), atol=1e-6)


def test_the_short_caption_is_the_first_sentence() -> None:
    view = FirstSentence().of_pair({}, Image.new("RGB", (2, 2)), "A cat. It sleeps.", random.Random(0))
    assert view == {"short": "A cat."}


def test_texts_of_two_lengths_go_through_the_tower_together() -> None:
    stacked = stack_texts([torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 5, dtype=torch.int64)], pad_id=7)
    assert stacked.tolist() == [[1, 1, 1, 7, 7], [1, 1, 1, 7, 7], [1, 1, 1, 1, 1]]


def test_without_its_short_branch_it_is_plain_fine_tuning(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    options = {"name": "longclip", "short_weight": 0.0}
    for name, sections in (("plain", {}), ("long", {"framework": options})):
        recipe = write_recipe(tmp_path, tiny_set, **sections, schedule={"epochs": 1})
        ranks(2).run(train_on_rank, "zero2", str(recipe), [f"run.name={name}"])
    assert losses_of(tmp_path / "runs" / "plain") == losses_of(tmp_path / "runs" / "long")


def test_the_loss_of_a_run_is_the_sum_of_both_terms(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, framework={"name": "longclip", "components": 4}, schedule={"epochs": 1})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole"])
    steps = steps_of(tmp_path / "runs" / "whole")
    assert steps[0]["loss"] == pytest.approx(steps[0]["objective"] + steps[0]["short"], rel=1e-6)
