"""One exponential for rows and columns where that is exact, two where it is not; and what is computed at all."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.objective import exponentials, make_objective, tiles
from tests.objective.cases import Batch, Outcome, dense_captions, formula, outcome, relative_error, strips_of

NUM_PAIRS = 40


def evaluate(batch: Batch, rows: int = NUM_PAIRS, name: str = "hn", **params: Any) -> Outcome:
    leaves = batch.leaves()
    budget = strips_of(rows, len(batch.image), batch.image.element_size())
    return outcome(make_objective(name, memory_budget=budget, **params)(*leaves), leaves)


@pytest.fixture
def separate(monkeypatch):
    """Counts the strips that take two exponentials."""
    spy = mock.Mock(side_effect=exponentials.weigh_separately)
    monkeypatch.setattr(tiles, "weigh_separately", spy)
    return spy


def outlier(batch: Batch, distance: float) -> Batch:
    """One image and its caption lie opposite to all others: their logits are far below the others' largest."""
    image, text = batch.image.clone(), batch.text.clone()
    image[3] = text[3] = -distance * text.mean(0) / text.mean(0).norm()
    return Batch(image, text, batch.scale)


@pytest.mark.parametrize("rows", [7, 10, NUM_PAIRS])
class TestChoice:
    def test_dense_captions_take_one(self, separate, rows):
        batch = dense_captions(NUM_PAIRS, dtype=torch.float32)
        assert relative_error(evaluate(batch, rows), formula(batch, 0.5)) < 1e-5
        assert separate.call_count == 0

    def test_logits_too_far_apart_take_two(self, separate, rows):
        batch = outlier(dense_captions(NUM_PAIRS, dtype=torch.float32), 1.0)
        assert relative_error(evaluate(batch, rows), formula(batch, 0.5)) < 1e-5
        assert separate.call_count >= 1

    @pytest.mark.parametrize("distance", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    def test_the_choice_is_invisible(self, monkeypatch, rows, distance):
        batch = outlier(dense_captions(NUM_PAIRS, dtype=torch.float32), distance)
        found = evaluate(batch, rows)
        assert relative_error(found, formula(batch, 0.5)) < 2e-5
        shared = exponentials.share_exponentials
        monkeypatch.setattr(tiles, "share_exponentials", lambda *args: shared(*args) and None)
        assert relative_error(evaluate(batch, rows), found) < 1e-5


class Products(TorchDispatchMode):
    """Counts matrix products by their shape, `[rows, inner, columns]`."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::matmul")
        if function._schema.name in names:
            a, b = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.shapes[a.shape[0], a.shape[1], b.shape[1]] += 1
        return function(*args, **(kwargs or {}))


def products(name: str, rows: int, **params: Any) -> Counter[tuple[int, ...]]:
    batch = dense_captions(NUM_PAIRS, dim=16, scale=20.0, dtype=torch.float32)
    with Products() as seen:
        evaluate(batch, rows, name, **params)
    return seen.shapes


@pytest.mark.parametrize("name", ["hn", "hn-centred", "hn-image", "uniform"])
@pytest.mark.parametrize("rows", [4, 10, NUM_PAIRS])
def test_a_margin_takes_no_further_matrix_product(name, rows):
    assert products(name, rows) == products("infonce", rows)


def test_three_products_where_logits_are_kept_and_four_where_not():
    """`ClipLoss` takes six: two of N x D x N forward, four backward."""
    assert products("hn", NUM_PAIRS) == {(40, 16, 40): 1, (40, 40, 16): 2}
    assert products("hn", 4) == {(4, 16, 40): 10 + 7, (4, 40, 16): 10, (40, 4, 16): 10}
