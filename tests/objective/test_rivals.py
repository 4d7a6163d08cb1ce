"""Every rival against its formula, written a second time: value and gradients, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.objective import make_objective
from pipeline.objective.rivals import SigLipLoss
from tests.objective import rival_formulas as formulas
from tests.objective.cases import Batch, Outcome, averaged, dense_captions, outcome, own_rows, relative_error

NUM_PAIRS = 12
IDS = torch.arange(NUM_PAIRS).index_fill(0, torch.tensor([2, 5, 9]), 0)
FROZEN = dense_captions(NUM_PAIRS + 1, dim=7).text[:NUM_PAIRS]

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of v, t, s, and which pairs are the same


def mean_of(loss: Callable[..., Tensor]) -> Formula:
    """The mean over the queries of both directions of `loss(direction, S, i, neg, v, t, s)`."""

    def formula(v: Tensor, t: Tensor, s: Tensor, same: Tensor) -> Tensor:
        first, second = formulas.both_directions(v, t, same, lambda *query: loss(*query, v, t, s))
        return (first.mean() + second.mean()) / 2

    return formula


def hinges(hardest: bool, margin: Callable[[Tensor], Tensor]) -> Formula:
    def formula(v: Tensor, t: Tensor, s: Tensor, same: Tensor) -> Tensor:
        m = margin(t.detach())
        first, second = formulas.both_directions(
            v, t, same, lambda _, S, i, neg: formulas.vse(S, i, neg, m[i], hardest)
        )
        return first.sum() + second.sum() + 0 * s

    return formula


def arm(v: Tensor, t: Tensor, s: Tensor, same: Tensor) -> Tensor:
    D = (t @ t.T, v @ v.T)
    first, second = formulas.both_directions(v, t, same, lambda d, S, i, neg: formulas.arm(S, i, neg, D[d][i]))
    return (first.sum() + second.sum()) / 2 / (~same).sum() + 0 * s


def guided(strategy: str, margin: float, guide: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    def loss(d: int, S: Tensor, i: int, neg: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        matrix = guide(v.detach(), t.detach())
        return formulas.gist(S, i, neg, s, (matrix, matrix.T)[d][i], margin, strategy)

    return mean_of(loss)


def soft(alpha: float, tau: float, relation: float) -> Formula:
    def loss(d: int, S: Tensor, i: int, neg: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        features = (v, t)[d].detach()
        return formulas.softclip(S, i, neg, s, features @ features[i], alpha, tau, relation)

    return mean_of(loss)


def weighted(features: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    def loss(d: int, S: Tensor, i: int, neg: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        f = features(v, t).detach()
        return formulas.cwcl(S, i, neg, s, f @ f[i])

    return mean_of(loss)


CASES: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "hn-nce": ("hn-nce", {}, mean_of(lambda d, S, i, neg, v, t, s: formulas.hn_nce(S, i, neg, s, 1.0, 0.5))),
    "hn-nce, alpha": (
        "hn-nce",
        {"alpha": 0.5, "beta": 0.25},
        mean_of(lambda d, S, i, neg, v, t, s: formulas.hn_nce(S, i, neg, s, 0.5, 0.25)),
    ),
    "hcl": (
        "hcl",
        {"beta": 0.3, "tau": 0.02},
        mean_of(lambda d, S, i, neg, v, t, s: formulas.hcl(S, i, neg, s, 0.3, 0.02)),
    ),
    "hcl, many false negatives": (
        "hcl",
        {"beta": 0.1, "tau": 0.3},
        mean_of(lambda d, S, i, neg, v, t, s: formulas.hcl(S, i, neg, s, 0.1, 0.3)),
    ),
    "debiased": ("debiased", {}, mean_of(lambda d, S, i, neg, v, t, s: formulas.debiased(S, i, neg, s, 0.1))),
    "gist": ("gist", {"margin": 0.2}, guided("absolute", 0.2, lambda v, t: t @ t.T)),
    "gist, absolute": (
        "gist",
        {"margin": 0.1, "guide": "pairs"},
        guided("absolute", 0.1, lambda v, t: v @ t.T),
    ),
    "gist, relative": (
        "gist",
        {"margin": 0.1, "guide": "pairs", "strategy": "relative"},
        guided("relative", 0.1, lambda v, t: v @ t.T),
    ),
    "gist, frozen": (
        "gist",
        {"margin": 0.3, "guide": "frozen"},
        guided("absolute", 0.3, lambda v, t: FROZEN @ FROZEN.T),
    ),
    "softclip": ("softclip", {}, soft(0.3, 0.1, 1.0)),
    "softclip, alpha 1": ("softclip", {"alpha": 1.0, "tau": 0.05, "relation": 0.0}, soft(1.0, 0.05, 0.0)),
    "cwcl": ("cwcl", {}, weighted(lambda v, t: t)),
    "cwcl, images": ("cwcl", {"weights": "images"}, weighted(lambda v, t: v)),
    "cwcl, frozen": ("cwcl", {"weights": "frozen"}, weighted(lambda v, t: FROZEN)),
    "vse": ("vse", {}, hinges(True, lambda t: torch.full_like(t @ t.T, 0.2))),
    "vse, all": ("vse", {"hardest": False, "m": 0.1}, hinges(False, lambda t: torch.full_like(t @ t.T, 0.1))),
    "vse-adaptive": ("vse-adaptive", {}, hinges(True, lambda t: 0.2 * t @ t.T)),
    "vse-adaptive, all": ("vse-adaptive", {"gamma": -0.1, "hardest": False}, hinges(False, lambda t: -0.1 * t @ t.T)),
    "arm": ("arm", {}, arm),
    "siglip": ("siglip", {}, lambda v, t, s, same: formulas.siglip(v, t, s, torch.tensor(-10.0), 0.0, same)),
    "siglip-hn": (
        "siglip-hn",
        {"gamma": 0.3, "bias": -5.0},
        lambda v, t, s, same: formulas.siglip(v, t, s, torch.tensor(-5.0), 0.3, same),
    ),
}


def evaluate(case: str, batch: Batch, rows: slice, ids: Tensor | None = None) -> Outcome:
    name, params, _ = CASES[case]
    objective = make_objective(name, **params)
    further = {"frozen_text_features": FROZEN[rows]}
    leaves = batch.rows(rows.start, rows.stop).leaves()
    loss = objective(*leaves, ids=None if ids is None else ids[rows], **{key: further[key] for key in objective.needs})
    return outcome(loss, leaves)


def expected(case: str, batch: Batch, ids: Tensor | None = None) -> Outcome:
    leaves = Batch(*(tensor.double() for tensor in batch)).leaves()
    keys = torch.arange(NUM_PAIRS) if ids is None else ids
    same = keys[:, None] == keys
    return outcome(CASES[case][2](*leaves[:2], leaves.scale.squeeze(), same), leaves)


def assert_close(found: Outcome, truth: Outcome, tolerance: float) -> None:
    """Relative to the truth, where there is one: a loss without a temperature has no gradient for it."""
    for name in Outcome._fields:
        a, b = getattr(found, name), getattr(truth, name)
        assert (a - b).norm() <= tolerance * b.norm() + 1e-15, name


ANY_CASE = pytest.mark.parametrize("case", CASES)


@ANY_CASE
class TestOneProcess:
    @pytest.mark.parametrize("ids", [None, IDS], ids=["", "ids"])
    def test_float64_equals_the_formula(self, case, ids):
        batch = dense_captions(NUM_PAIRS, scale=15.0)
        assert_close(evaluate(case, batch, slice(0, NUM_PAIRS), ids), expected(case, batch, ids), 1e-10)

    def test_float32_at_scale_100_equals_the_formula_in_float64(self, case):
        batch = dense_captions(NUM_PAIRS, scale=100.0, dtype=torch.float32)
        assert_close(evaluate(case, batch, slice(0, NUM_PAIRS)), expected(case, batch), 2e-5)

    def test_a_pair_without_negatives_is_no_nan(self, case):
        found = evaluate(case, dense_captions(NUM_PAIRS), slice(0, 1))
        assert all(tensor.isfinite().all() for tensor in found)


def all_on_rank(batch: Batch) -> dict[str, Outcome]:
    return {case: evaluate(case, batch, own_rows(NUM_PAIRS), IDS) for case in CASES}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_equal_one_process(ranks, world_size):
    batch = dense_captions(NUM_PAIRS, scale=15.0)
    found = ranks(world_size).run(all_on_rank, batch)
    for case in CASES:
        assert_close(averaged([rank[case] for rank in found]), expected(case, batch, IDS), 1e-10)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("hn-nce", {"beta": 0.0}),
        ("hcl", {"beta": 0.0, "tau": 0.0}),
        ("debiased", {"tau": 0.0}),
        ("gist", {"margin": 0.0}),
        ("softclip", {"alpha": 0.0, "relation": 0.0}),
    ],
)
def test_where_they_are_clip_loss(name, params):
    from open_clip.loss import ClipLoss  # here, not above: ranks import this file, and open_clip takes 6 CPU seconds

    leaves = dense_captions(NUM_PAIRS).leaves()
    found = outcome(make_objective(name, **params)(*leaves), leaves)
    assert relative_error(found, outcome(ClipLoss()(*leaves), leaves)) < 1e-9


def learned_bias(batch: Batch) -> tuple[Outcome, Tensor]:
    rows, bias = own_rows(NUM_PAIRS), torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    leaves = batch.rows(rows.start, rows.stop).leaves()
    loss = SigLipLoss()(*leaves, logit_bias=bias)
    (gradient,) = torch.autograd.grad(loss, bias, retain_graph=True)
    return outcome(loss, leaves), gradient


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bias_of_siglip_learns_as_in_open_clip(ranks, world_size):
    from open_clip.loss import SigLipLoss as OpenClipSigLipLoss

    batch = dense_captions(NUM_PAIRS, scale=15.0)
    leaves, bias = batch.leaves(), torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    loss = OpenClipSigLipLoss()(*leaves, bias)
    (gradient,) = torch.autograd.grad(loss, bias, retain_graph=True)
    found = ranks(world_size).run(learned_bias, batch)
    assert relative_error(averaged([rank for rank, _ in found]), outcome(loss, leaves)) < 1e-10
    assert torch.stack([g for _, g in found]).mean().item() == pytest.approx(gradient.item(), rel=1e-10)


def test_half_precision_features_get_float32_matrices():
    batch = dense_captions(NUM_PAIRS, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = evaluate("hn-nce", batch, slice(0, NUM_PAIRS))
    assert found.loss.item() == pytest.approx(expected("hn-nce", batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("hn-nce", {"beta": -1.0}, "beta must be between 0 and inf, not -1.0"),
        ("hcl", {"tau": 1.0}, "tau must be between 0 and 0.999, not 1.0"),
        ("gist", {"guide": "text"}, "guide must be one of captions, pairs, frozen, not 'text'"),
        ("gist", {"strategy": "top"}, "strategy must be one of absolute, relative, not 'top'"),
        ("softclip", {"tau": 0.0}, "tau must be between 0.001 and inf"),
        ("cwcl", {"weights": "all"}, "weights must be one of captions, images, frozen"),
        ("vse", {"hardest": 1}, "hardest must be true or false, not 1"),
        ("siglip", {"bias": float("nan")}, "bias must be a finite number"),
    ],
)
def test_parameters_that_cannot_be_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        make_objective(name, **params)


def test_frozen_features_are_given_exactly_where_they_are_needed():
    batch = dense_captions(NUM_PAIRS)
    with pytest.raises(ValueError, match="needs frozen_text_features"):
        make_objective("cwcl", weights="frozen")(*batch)
    with pytest.raises(ValueError, match="does not use frozen_text_features"):
        make_objective("siglip")(*batch, frozen_text_features=FROZEN)


def test_output_dict_as_in_open_clip():
    batch = dense_captions(NUM_PAIRS)
    for name in ("arm", "siglip"):
        objective = make_objective(name)
        assert objective(*batch, output_dict=True) == {"contrastive_loss": objective(*batch)}
