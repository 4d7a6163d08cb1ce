"""Value and gradients on real ranks equal those of the concatenated batch in one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective import HNClipLoss
from tests.objective.cases import (
    Batch,
    Outcome,
    averaged,
    dense_captions,
    formula,
    outcome,
    own_rows,
    relative_error,
    strips_of,
)

NUM_PAIRS = 24


def on_rank(batch: Batch, gamma: float, ids: Tensor | None = None, memory_budget: int = 2**20) -> Outcome:
    """What this rank gets for its rows of the batch."""
    rows = own_rows(NUM_PAIRS)
    leaves = batch.rows(rows.start, rows.stop).leaves()
    loss = HNClipLoss(gamma, memory_budget=memory_budget)(*leaves, ids=None if ids is None else ids[rows])
    return outcome(loss, leaves)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
class TestParity:
    def test_float64(self, ranks, world_size, gamma):
        batch = dense_captions(NUM_PAIRS)
        found = averaged(ranks(world_size).run(on_rank, batch, gamma))
        assert relative_error(found, formula(batch, gamma)) < 1e-10

    def test_float32(self, ranks, world_size, gamma):
        batch = dense_captions(NUM_PAIRS, dtype=torch.float32)
        found = averaged(ranks(world_size).run(on_rank, batch, gamma))
        assert relative_error(found, formula(batch, gamma)) < 1e-5

    def test_bfloat16(self, ranks, world_size, gamma):
        batch = dense_captions(NUM_PAIRS, dtype=torch.bfloat16)
        found, expected = averaged(ranks(world_size).run(on_rank, batch, gamma)), formula(batch, gamma)
        assert found.loss == pytest.approx(expected.loss.item(), rel=1e-5)
        assert relative_error(found, expected) < torch.finfo(torch.bfloat16).eps

    @pytest.mark.parametrize("rows", [1, 4, 7])
    def test_strips(self, ranks, world_size, gamma, rows):
        batch, budget = dense_captions(NUM_PAIRS), strips_of(rows, NUM_PAIRS, 8)
        found = averaged(ranks(world_size).run(on_rank, batch, gamma, None, budget))
        assert relative_error(found, formula(batch, gamma)) < 1e-10

    def test_ids_that_repeat_within_and_across_ranks(self, ranks, world_size, gamma):
        batch, ids = dense_captions(NUM_PAIRS), torch.arange(NUM_PAIRS)
        ids[[1, 7, 23]] = 0
        ids[2] = 3
        found = averaged(ranks(world_size).run(on_rank, batch, gamma, ids))
        assert relative_error(found, formula(batch, gamma, ids)) < 1e-10


def with_extreme_rows(batch: Batch) -> Batch:
    image = batch.image.clone()
    image[:3] = -batch.text[:3]
    image[-3:] = batch.text[-3:]
    return Batch(image, batch.text, batch.scale)


def test_maxima_hundreds_apart_merge_across_ranks(ranks):
    batch = with_extreme_rows(dense_captions(NUM_PAIRS, dtype=torch.float32))
    assert relative_error(averaged(ranks(4).run(on_rank, batch, 0.5)), formula(batch, 0.5)) < 1e-5


def in_two_halves(batch: Batch) -> Outcome:
    """Each pair of ranks shares a batch of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[dist.get_rank() // 2]
    rows = own_rows(NUM_PAIRS, group)
    leaves = batch.rows(rows.start, rows.stop).leaves()
    found = outcome(HNClipLoss(group=group)(*leaves), leaves)
    for half in halves:
        dist.destroy_process_group(half)
    return found


def test_a_subgroup_is_a_global_batch_of_its_own(ranks):
    batch = dense_captions(NUM_PAIRS)
    found = ranks(4).run(in_two_halves, batch)
    for half in (found[:2], found[2:]):
        assert relative_error(averaged(half), formula(batch, 0.5)) < 1e-10


def outside_of_group() -> str:
    group = dist.new_group([0])
    try:
        HNClipLoss(group=group)(*dense_captions(3))
        return "passed"
    except ValueError as error:
        return str(error)


def test_a_rank_outside_the_group_is_told_so(ranks):
    assert ranks(2).run(outside_of_group) == [
        "passed",
        "this rank is not a member of the process group of the objective",
    ]


def text_frozen_on_rank_0(batch: Batch) -> list[Tensor | None]:
    rows = own_rows(NUM_PAIRS)
    leaves = batch.rows(rows.start, rows.stop).leaves()
    leaves.text.requires_grad_(dist.get_rank() != 0)
    HNClipLoss()(*leaves).backward()
    return [leaf.grad for leaf in leaves]


def test_a_rank_whose_text_is_frozen_still_serves_the_others(ranks):
    batch = dense_captions(NUM_PAIRS)
    expected = formula(batch, 0.5)
    (image_0, text_0, _), (image_1, text_1, _) = ranks(2).run(text_frozen_on_rank_0, batch)
    assert text_0 is None
    assert torch.allclose(torch.cat([image_0, image_1]) / 2, expected.image, rtol=1e-10)
    assert torch.allclose(text_1 / 2, expected.text[NUM_PAIRS // 2 :], rtol=1e-10)


COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")


def count_elements(batch: Batch) -> dict[str, list[int]]:
    """Elements of the larger side of every collective, by its name."""
    calls: dict[str, list[int]] = {name: [] for name in COLLECTIVES}

    def spy(name: str) -> mock._patch:
        original = getattr(dist, name)

        def call(*tensors: Tensor, **options: object) -> object:
            calls[name].append(max(tensor.numel() for tensor in tensors))
            return original(*tensors, **options)

        return mock.patch.object(dist, name, call)

    with spy(COLLECTIVES[0]), spy(COLLECTIVES[1]), spy(COLLECTIVES[2]):
        on_rank(batch, 0.5)
    return calls


def test_what_travels_is_linear_in_the_batch(ranks):
    """The captions once, their gradient once, and a few numbers a pair."""
    N, D = dense_captions(NUM_PAIRS).text.shape
    for calls in ranks(2).run(count_elements, dense_captions(NUM_PAIRS)):
        assert calls == {
            "all_gather_into_tensor": [2 * 8, N * D, N],
            "all_reduce": [N, N + 1],
            "reduce_scatter_tensor": [N * D],
        }


def refusal(inputs: list[dict[str, Tensor]]) -> str:
    try:
        HNClipLoss()(**inputs[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return "accepted"


def refusal_of_captions(caption_keys: list[Tensor | None]) -> str:
    try:
        HNClipLoss(equal_captions=True)(**features(3), caption_keys=caption_keys[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return "accepted"


def features(n: int, dim: int = 4, dtype: torch.dtype = torch.float32, **more: Tensor) -> dict[str, Tensor]:
    ones = torch.ones(n, dim, dtype=dtype)
    return {"image_features": ones, "text_features": ones, "logit_scale": torch.ones(1), **more}


class TestDisagreement:
    """All ranks raise, so that none waits for the others in a collective."""

    def test_unequal_batches_are_refused_on_every_rank(self, ranks):
        for answer in ranks(4).run(refusal, [features(n) for n in (3, 3, 2, 3)]):
            assert "ranks 0 to 3 bring [3, 3, 2, 3]" in answer

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (features(3, dim=5), "embedding width differs between the ranks: [4, 5]"),
            (features(3, dtype=torch.float64), "dtype differs between the ranks: ['torch.float32', 'torch.float64']"),
            (features(3, ids=torch.arange(3)), "presence of ids differs between the ranks: [0, 1]"),
        ],
    )
    def test_inputs_that_do_not_fit_together(self, ranks, other, message):
        for answer in ranks(2).run(refusal, [features(3), other]):
            assert message in answer

    def test_a_missing_input_of_one_rank_stops_all(self, ranks):
        given, missing = ranks(2).run(refusal_of_captions, [torch.arange(3), None])
        assert given == "rank(s) [1] got inputs that cannot be used; the error there says why"
        assert missing == "this objective needs caption_keys: call it with caption_keys=..."

    def test_a_fault_of_one_rank_stops_all(self, ranks):
        faulty = {**features(3), "logit_scale": torch.ones(2)}
        first, second = ranks(2).run(refusal, [features(3), faulty])
        assert first == "rank(s) [1] got inputs that cannot be used; the error there says why"
        assert "logit_scale must be one" in second
