"""Every margin of the family, and every option, against the formula with its margin as a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.objective import make_objective
from tests.objective.cases import (
    Batch,
    Outcome,
    averaged,
    dense_captions,
    margin_formula,
    outcome,
    own_rows,
    relative_error,
)

NUM_PAIRS = 24
# Two ids and three captions repeat; pairs 2 and 9 share both, pair 5 shares an id with one and a caption with another.
IDS = torch.arange(NUM_PAIRS).index_fill(0, torch.tensor([2, 5, 9]), 0).index_fill(0, torch.tensor([20, 23]), 1)
CAPTIONS = torch.arange(NUM_PAIRS).index_fill(0, torch.tensor([2, 9, 14]), 0).index_fill(0, torch.tensor([5, 17]), 1)


def frozen_captions(num_pairs: int) -> Tensor:
    """The captions by another encoder, of another width."""
    return dense_captions(num_pairs + 1, dim=11).text[:num_pairs]


def mean_off_diagonal(G: Tensor) -> Tensor:
    return G[~torch.eye(len(G), dtype=torch.bool)].mean()


def live(batch: Batch) -> Tensor:
    return batch.text.double() @ batch.text.double().T


def frozen(batch: Batch) -> Tensor:
    t0 = frozen_captions(len(batch.text)).to(batch.text.dtype).double()
    return t0 @ t0.T


def images(batch: Batch) -> Tensor:
    return batch.image.double() @ batch.image.double().T


MARGINS: dict[str, tuple[str, dict[str, float], Callable[[Batch], Tensor]]] = {
    "infonce": ("infonce", {}, lambda batch: torch.zeros(len(batch.text), len(batch.text)).double()),
    "hn": ("hn", {"gamma": 0.4}, lambda batch: 0.4 * live(batch)),
    "hn of the opposite sign": ("hn", {"gamma": -0.2}, lambda batch: -0.2 * live(batch)),
    "hn-frozen": ("hn-frozen", {"gamma": 0.4}, lambda batch: 0.4 * frozen(batch)),
    "hn-centred": ("hn-centred", {"gamma": 0.4}, lambda batch: 0.4 * (live(batch) - mean_off_diagonal(live(batch)))),
    "hn-image": ("hn-image", {"gamma": 0.4}, lambda batch: 0.4 * images(batch)),
    "uniform m": ("uniform", {"m": 0.3}, lambda batch: torch.full_like(live(batch), 0.3)),
    "uniform gamma": (
        "uniform",
        {"gamma": 0.4},
        lambda batch: torch.full_like(live(batch), 0.4 * mean_off_diagonal(live(batch)).item()),
    ),
}
ANY_MARGIN = pytest.mark.parametrize("margin", MARGINS)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "decoupled": {"decoupled": True},
    "captions": {"equal_captions": True},
    "smooth captions": {"label_smoothing": 0.1, "equal_captions": True},
}


def evaluate(margin: str, batch: Batch, rows: slice, ids: Tensor | None = None, **options: Any) -> Outcome:
    """The objective of these rows, with the further inputs that it says it needs."""
    name, params, _ = MARGINS[margin]
    objective = make_objective(name, **params, **options)
    further = {"caption_keys": CAPTIONS[rows], "frozen_text_features": frozen_captions(len(batch.text))[rows]}
    leaves = batch.rows(rows.start, rows.stop).leaves()
    loss = objective(
        *leaves, ids=None if ids is None else ids[rows], **{name: further[name] for name in objective.needs}
    )
    return outcome(loss, leaves)


def expected(margin: str, batch: Batch, ids: Tensor | None = None, **options: Any) -> Outcome:
    keys = [key for key in (ids, CAPTIONS if options.get("equal_captions") else None) if key is not None]
    smoothing, decoupled = options.get("label_smoothing", 0.0), options.get("decoupled", False)
    return margin_formula(batch, MARGINS[margin][2](batch), keys, smoothing, decoupled)


@ANY_MARGIN
@pytest.mark.parametrize("option", OPTIONS)
class TestOneProcess:
    @pytest.mark.parametrize("ids", [None, IDS], ids=["", "ids"])
    def test_float64_equals_the_formula(self, margin, option, ids):
        batch = dense_captions(NUM_PAIRS, scale=20.0)
        found = evaluate(margin, batch, slice(0, NUM_PAIRS), ids, **OPTIONS[option])
        assert relative_error(found, expected(margin, batch, ids, **OPTIONS[option])) < 1e-10

    def test_float32_equals_the_formula_in_float64(self, margin, option):
        batch = dense_captions(NUM_PAIRS, dtype=torch.float32)
        found = evaluate(margin, batch, slice(0, NUM_PAIRS), IDS, **OPTIONS[option])
        assert relative_error(found, expected(margin, batch, IDS, **OPTIONS[option])) < 1e-5


def all_on_rank(batch: Batch) -> dict[tuple[str, str], Outcome]:
    rows = own_rows(NUM_PAIRS)
    return {(m, o): evaluate(m, batch, rows, IDS, **OPTIONS[o]) for m in MARGINS for o in OPTIONS}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process(ranks, world_size):
    batch = dense_captions(NUM_PAIRS, scale=20.0)
    found = ranks(world_size).run(all_on_rank, batch)
    for margin, option in found[0]:
        error = relative_error(
            averaged([rank[margin, option] for rank in found]), expected(margin, batch, IDS, **OPTIONS[option])
        )
        assert error < 1e-10, (margin, option)


def test_half_precision_frozen_margin():
    batch = dense_captions(NUM_PAIRS, dtype=torch.bfloat16)
    found, truth = evaluate("hn-frozen", batch, slice(0, NUM_PAIRS)), expected("hn-frozen", batch)
    assert found.loss == pytest.approx(truth.loss.item(), rel=1e-5)
    assert relative_error(found, truth) < torch.finfo(torch.bfloat16).eps


def test_decoupled_keeps_a_gradient_where_infonce_has_none():
    text = torch.eye(2).double()
    batch = Batch(text, text, torch.tensor([800.0]).double())
    loss, decoupled = (evaluate("infonce", batch, slice(0, 2), decoupled=flag) for flag in (False, True))
    assert loss.image.abs().max() == 0
    assert torch.allclose(decoupled.image, torch.tensor([[-800.0, 800.0], [800.0, -800.0]]).double() / 2)


@pytest.mark.parametrize("option", ["plain", "smooth", "decoupled"])
@ANY_MARGIN
def test_a_single_pair_has_no_loss(margin, option):
    found = evaluate(margin, dense_captions(1), slice(0, 1), **OPTIONS[option])
    assert all(tensor.abs().max() < 1e-12 for tensor in found)


def test_a_batch_of_one_repeated_sample_has_no_decoupled_loss_either():
    found = evaluate("hn", dense_captions(4), slice(0, 4), torch.zeros(4, dtype=torch.int64), decoupled=True)
    assert all(tensor.count_nonzero() == 0 for tensor in found)


def test_the_pulls_of_hn_are_those_of_centred_and_uniform_together():
    """`gamma G = gamma (G - mean) + gamma mean`, so their margins add up to that of HN-CLIP."""
    batch = dense_captions(NUM_PAIRS)
    both = MARGINS["hn-centred"][2](batch) + MARGINS["uniform gamma"][2](batch)
    assert torch.allclose(both, MARGINS["hn"][2](batch), atol=1e-14)
    assert relative_error(evaluate("hn", batch, slice(0, NUM_PAIRS)), margin_formula(batch, both)) < 1e-10


class TestParameters:
    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            ("hn", {"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, not 1.0"),
            ("infonce", {"label_smoothing": -0.1}, "label_smoothing must be at least 0"),
            ("infonce", {"label_smoothing": 0.1, "decoupled": True}, "exclude each other"),
            ("infonce", {"decoupled": "yes"}, "decoupled must be true or false, not 'yes'"),
            ("infonce", {"equal_captions": 1}, "equal_captions must be true or false, not 1"),
            ("uniform", {"m": 0.2, "gamma": 0.5}, "give m, or gamma"),
            ("uniform", {"m": float("inf")}, "m must be a finite number"),
            ("hn", {"gamma_schedule": "sine"}, "gamma_schedule must be one of linear, cosine, not 'sine'"),
            ("hn", {"gamma_start": 1.0}, "gamma_start needs a gamma_schedule: linear, cosine"),
            ("hn", {"gamma_start": float("nan"), "gamma_schedule": "linear"}, "gamma_start must be a finite number"),
        ],
    )
    def test_what_cannot_be_is_refused(self, name, params, message):
        with pytest.raises(ValueError, match=message):
            make_objective(name, **params)

    @pytest.mark.parametrize(
        ("name", "params", "given", "message"),
        [
            ("hn", {"equal_captions": True}, (), r"needs caption_keys: call it with caption_keys=\.\.\."),
            ("hn", {}, ("caption_keys",), "does not use caption_keys: leave them out, or set equal_captions=True"),
            ("hn-frozen", {}, (), "needs frozen_text_features"),
            ("hn", {}, ("frozen_text_features",), "does not use frozen_text_features: leave them out$"),
        ],
    )
    def test_further_inputs_are_given_exactly_where_they_are_needed(self, name, params, given, message):
        batch, further = dense_captions(4), {"caption_keys": torch.arange(4), "frozen_text_features": torch.ones(4, 2)}
        with pytest.raises(ValueError, match=message):
            make_objective(name, **params)(*batch, **{key: further[key] for key in given})

    @pytest.mark.parametrize(
        ("name", "params", "further", "message"),
        [
            ("hn", {"equal_captions": True}, {"caption_keys": torch.ones(4)}, "caption_keys must be int64"),
            ("hn-frozen", {}, {"frozen_text_features": torch.ones(3, 2)}, r"must be \[4, D\] .* not \[3, 2\]"),
            ("hn-frozen", {}, {"frozen_text_features": torch.ones(4, 2, device="meta")}, "are on meta"),
        ],
    )
    def test_unusable_further_inputs_are_refused(self, name, params, further, message):
        with pytest.raises(ValueError, match=message):
            make_objective(name, **params)(*dense_captions(4), **further)

    def test_they_say_what_they_need(self):
        assert make_objective("hn").needs == ()
        assert make_objective("hn-frozen", equal_captions=True).needs == ("frozen_text_features", "caption_keys")

    def test_they_show_what_they_are(self):
        assert repr(make_objective("hn", label_smoothing=0.1)) == "HNClipLoss(gamma=0.5, label_smoothing=0.1)"
        assert repr(make_objective("uniform", m=0.3)) == "UniformMarginLoss(m=0.3)"


class TestSchedule:
    @pytest.mark.parametrize(
        ("shape", "values"),
        [("linear", [-0.2, 0.0, 0.2, 0.4, 0.6]), ("cosine", [-0.2, -0.2 + 0.8 * 0.1464466, 0.2, 0.6 - 0.1171573, 0.6])],
    )
    def test_gamma_goes_from_start_to_end(self, shape, values):
        objective = make_objective("hn", gamma=0.6, gamma_start=-0.2, gamma_schedule=shape)
        assert objective.gamma == -0.2
        for fraction, value in zip((0, 0.25, 0.5, 0.75, 1), values, strict=True):
            objective.set_progress(fraction)
            assert objective.gamma == pytest.approx(value, abs=1e-6)

    def test_it_starts_at_0_and_stays_within_its_ends(self):
        objective = make_objective("hn-frozen", gamma=0.6, gamma_schedule="linear")
        assert objective.needs == ("frozen_text_features",)
        for fraction, value in ((-1, 0.0), (2, 0.6)):
            objective.set_progress(fraction)
            assert objective.gamma == value

    def test_the_loss_follows(self):
        batch = dense_captions(NUM_PAIRS)
        objective = make_objective("hn", gamma=1.0, gamma_schedule="linear")
        for gamma in (0.0, 0.25, 1.0):
            objective.set_progress(gamma)
            assert objective(*batch) == make_objective("hn", gamma=gamma)(*batch)

    def test_without_a_schedule_progress_changes_nothing(self):
        for name in ("hn", "infonce"):
            objective = make_objective(name)
            before = repr(objective)
            objective.set_progress(0.1)
            assert repr(objective) == before
