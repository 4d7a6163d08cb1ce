"""The figures about saturation, counted a second time from the logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeline.objective import HNClipLoss, make_objective
from pipeline.objective.registry import OBJECTIVES
from tests.objective.cases import Batch, dense_captions, formula, own_rows, strips_of

NUM_PAIRS = 24


def expected_figures(batch: Batch, gamma: float) -> dict[str, float]:
    """From the N x N matrix in float64, and from cross-entropy in float32."""
    v, t, s = (tensor.double() for tensor in batch)
    own = torch.eye(len(v), dtype=torch.bool)
    cosine = v @ t.T + gamma * (t @ t.T).masked_fill(own, 0)
    z32, y = (s * cosine).float(), torch.arange(len(v))
    lead = cosine.diagonal() - cosine.masked_fill(own, -2).amax(1)
    p = (s * cosine).masked_fill(own, -torch.inf).softmax(1)
    truth = formula(batch, gamma)
    gradients = torch.cat([truth.image, truth.text])
    return {
        "zero_rows": (F.cross_entropy(z32, y, reduction="none") == 0).double().mean().item(),
        "zero_columns": (F.cross_entropy(z32.T, y, reduction="none") == 0).double().mean().item(),
        "gap_q05": lead.quantile(0.05, interpolation="lower").item(),
        "gap_q50": lead.quantile(0.5, interpolation="lower").item(),
        "gap_q95": lead.quantile(0.95, interpolation="lower").item(),
        "effective_negatives": torch.special.entr(p).sum(1).exp().mean().item(),
        "max_feature_grad": gradients.abs().max().item(),
        "feature_grad_norm": gradients.norm().item(),
    }


def saturated() -> Batch:
    """Half of the pairs have positives so far above their negatives that cross-entropy in float32 reads 0."""
    batch = dense_captions(NUM_PAIRS, dtype=torch.float32)
    image = batch.image.clone()
    image[::2] = F.normalize(batch.text[::2] - 0.9 * batch.text.mean(0), dim=1)
    return Batch(image, batch.text, batch.scale)


def figures(batch: Batch, gamma: float, rows: slice, memory_budget: int = 2**20) -> dict[str, float | str]:
    objective = HNClipLoss(gamma, memory_budget=memory_budget)
    objective(*batch.rows(rows.start, rows.stop).leaves()).backward()
    return objective.saturation()


def figures_on_rank(batch: Batch, gamma: float) -> dict[str, float | str]:
    return figures(batch, gamma, own_rows(NUM_PAIRS))


@pytest.mark.parametrize("gamma", [0.0, 0.3])
@pytest.mark.parametrize("rows", [5, NUM_PAIRS])
def test_figures_equal_those_of_the_matrix(gamma, rows):
    batch = saturated()
    found = figures(batch, gamma, slice(0, NUM_PAIRS), strips_of(rows, NUM_PAIRS, 4))
    assert found.pop("dtype") == "float32/float32"
    assert found == pytest.approx(expected_figures(batch, gamma), rel=1e-4, abs=1e-12)
    assert gamma or 0.2 < found["zero_rows"] < 0.9


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_are_those_of_the_global_batch_on_every_rank(ranks, world_size):
    batch = saturated()
    first, *others = ranks(world_size).run(figures_on_rank, batch, 0.3)
    assert all(other == first for other in others)
    first.pop("dtype")
    assert first == pytest.approx(expected_figures(batch, 0.3), rel=1e-4, abs=1e-12)


def test_a_gradient_too_small_for_a_float32_norm_is_still_seen():
    text = F.normalize(torch.tensor([[1.0, 0.0], [0.4, 0.917]]), dim=1)
    batch = Batch(text, text, torch.tensor([100.0]))
    found, truth = figures(batch, 0.0, slice(0, 2)), formula(batch, 0.0)
    norm = torch.cat([truth.image, truth.text]).norm()
    assert 0 < norm < 1e-22  # its square is below the smallest float32
    assert found["feature_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert found["zero_rows"] == found["zero_columns"] == 1.0


def test_pairs_without_negatives():
    objective = HNClipLoss()
    objective(*dense_captions(4), ids=torch.zeros(4, dtype=torch.int64))
    found = objective.saturation()
    assert (found["zero_rows"], found["effective_negatives"]) == (1.0, 0.0)
    assert found["gap_q50"] == float("inf")


def test_bfloat16_is_named_and_no_gradient_is_no_figure():
    objective = HNClipLoss()
    assert objective.saturation() == {}
    with torch.no_grad():
        objective(*dense_captions(6, dtype=torch.bfloat16))
    found = objective.saturation()
    assert found["dtype"] == "bfloat16/float32"
    assert found["max_feature_grad"] == found["feature_grad_norm"] == 0.0


COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")


def collectives_of(name: str) -> list[tuple[str, int]]:
    """Collectives of an evaluation with gradients, with the elements of their larger side."""
    calls: list[tuple[str, int]] = []
    originals = {collective: getattr(dist, collective) for collective in COLLECTIVES}

    def counting(collective: str) -> object:
        def call(*tensors: Tensor, **options: object) -> object:
            calls.append((collective, max(tensor.numel() for tensor in tensors)))
            return originals[collective](*tensors, **options)

        return call

    batch = dense_captions(NUM_PAIRS, dtype=torch.float32)
    rows = own_rows(NUM_PAIRS)
    for collective in COLLECTIVES:
        setattr(dist, collective, counting(collective))
    try:
        make_objective(name)(*batch.rows(rows.start, rows.stop).leaves()).backward()
    finally:
        for collective, original in originals.items():
            setattr(dist, collective, original)
    return calls


def test_neither_the_margin_nor_the_monitor_adds_a_collective(ranks):
    infonce = ranks(2).run(collectives_of, "infonce")[0]
    assert [name for name, _ in infonce] == [*COLLECTIVES[:1] * 3, *COLLECTIVES[1:2] * 2, COLLECTIVES[2]]
    for name in ("hn", "hn-centred", "uniform", "hn-image"):
        assert ranks(2).run(collectives_of, name)[0] == infonce


def test_objectives_without_a_monitor_have_no_figures():
    for name in set(OBJECTIVES) - {"infonce", "hn", "hn-frozen", "hn-centred", "hn-image", "uniform"}:
        assert make_objective(name).saturation() == {}
