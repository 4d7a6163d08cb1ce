from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss
from torch import Tensor

from pipeline.objective import HNClipLoss, hn_clip, tiles
from pipeline.objective.reference import reference_loss
from tests.bench.measure import peak_bytes
from tests.objective import cases
from tests.objective.cases import Batch, Outcome, dense_captions, formula, outcome, relative_error

ANY_GAMMA = pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, -0.5])
ANY_SCALE = pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])


def evaluate(batch: Batch, gamma: float = 0.5, ids: Tensor | None = None, **params: int) -> Outcome:
    leaves = batch.leaves()
    return outcome(HNClipLoss(gamma, **params)(*leaves, ids=ids), leaves)


def strips_of(rows: int, batch: Batch) -> int:
    return cases.strips_of(rows, len(batch.image), batch.image.element_size())


class TestValueAndGradients:
    @ANY_GAMMA
    @ANY_SCALE
    def test_float64_equals_the_formula(self, gamma, scale):
        batch = dense_captions(37, scale=scale)
        assert relative_error(evaluate(batch, gamma), formula(batch, gamma)) < 1e-10

    @ANY_GAMMA
    @ANY_SCALE
    def test_float32_equals_the_formula_in_float64(self, gamma, scale):
        batch = dense_captions(37, scale=scale, dtype=torch.float32)
        assert relative_error(evaluate(batch, gamma), formula(batch, gamma)) < 1e-5

    @pytest.mark.parametrize("gamma", [0.0, 0.5])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_features_get_float32_logits(self, gamma, dtype):
        batch = dense_captions(37, dtype=dtype)
        found, expected = evaluate(batch, gamma), formula(batch, gamma)
        assert found.loss == pytest.approx(expected.loss.item(), rel=1e-5)
        # The gradients are rounded once, to the dtype of the features.
        assert relative_error(found, expected) < torch.finfo(dtype).eps

    @pytest.mark.parametrize("gamma", [0.0, 0.5])
    def test_the_readable_reference_says_the_same(self, gamma):
        batch, ids = dense_captions(11), torch.arange(11) % 8
        leaves = batch.leaves()
        found = outcome(reference_loss(*leaves, gamma=gamma, ids=ids), leaves)
        assert relative_error(found, formula(batch, gamma, ids)) < 1e-10

    def test_without_margin_it_is_clip_loss(self):
        leaves = dense_captions(20).leaves()
        expected = outcome(ClipLoss()(*leaves), leaves)
        assert relative_error(evaluate(leaves, gamma=0.0), expected) < 1e-10

    def test_a_frozen_margin_passes_gradcheck(self):
        """Finite differences, with the margin held still as the formula says: it is Gbar of the unmoved captions."""
        image, text, scale = dense_captions(6, dim=4, scale=10.0)
        Gbar = (text @ text.T).fill_diagonal_(0)
        y = torch.arange(6)

        def still(v: Tensor, t: Tensor, s: Tensor) -> Tensor:
            z = s * (v @ t.T + 0.5 * Gbar)
            cross_entropy = torch.nn.functional.cross_entropy
            return (cross_entropy(z, y) + cross_entropy(z.T, y)) / 2

        leaves = Batch(image, text, scale).leaves()
        assert torch.autograd.gradcheck(still, tuple(leaves))
        assert relative_error(evaluate(leaves), outcome(still(*leaves), leaves)) < 1e-10
        assert torch.autograd.gradcheck(HNClipLoss(gamma=0.0), tuple(leaves))

    def test_an_upstream_factor_scales_the_gradients(self):
        leaves = dense_captions(9).leaves()
        loss = HNClipLoss()(*leaves)
        plain = torch.autograd.grad(loss, tuple(leaves), retain_graph=True)
        tripled = torch.autograd.grad(3 * loss, tuple(leaves))
        for a, b in zip(plain, tripled, strict=True):
            assert torch.allclose(3 * a, b, rtol=1e-12)

    @pytest.mark.parametrize("num_pairs", [1, 2, 3])
    def test_smallest_batches(self, num_pairs):
        batch = dense_captions(num_pairs)
        found, expected = evaluate(batch), formula(batch, 0.5)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-300)


class TestExtremes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("gamma", [0.5, -0.5])
    def test_logits_200_apart_neither_overflow_nor_underflow(self, dtype, gamma):
        """Rows and columns whose largest logits are hundreds apart: no one shift serves them all."""
        batch = dense_captions(16, dtype=torch.float64)
        image, text = batch.image.clone(), batch.text.clone()
        image[::4] = -text[::4]  # positives at -100, below every negative
        image[1::4] = text[1::4]  # positives at 100
        text[2] = -text[3]  # a column far below all others
        batch = Batch(image.to(dtype), text.to(dtype), batch.scale.to(dtype))
        found, expected = evaluate(batch, gamma), formula(batch, gamma)
        assert all(tensor.isfinite().all() for tensor in found)
        assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-10)

    @pytest.mark.parametrize("gap", [0.17, 0.3, 0.55, 0.8])
    def test_tiny_losses_keep_their_digits(self, gap):
        """Where cross-entropy in float32 reads 0.0 and its gradient vanishes (the paper's gradient dynamics)."""
        caption = torch.tensor([[1.0, 0.0], [1 - gap, (1 - (1 - gap) ** 2) ** 0.5]], dtype=torch.float64)
        batch = Batch(caption.float(), caption.float(), torch.tensor([100.0]))
        found, expected = evaluate(batch, gamma=0.0), formula(batch, 0.0)
        assert 0 < expected.loss < 1e-6
        assert relative_error(found, expected) < 2e-5


class TestTiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_strips_of_any_height_agree(self, dtype):
        """One row, several with a remainder, all: kept between the passes or computed twice."""
        batch, ids = dense_captions(29, dtype=dtype), torch.arange(29) % 27
        whole = evaluate(batch, ids=ids, memory_budget=strips_of(29, batch))
        for rows in (1, 2, 7, 10, 28):
            found = evaluate(batch, ids=ids, memory_budget=strips_of(rows, batch))
            assert relative_error(found, whole) < (5e-6 if dtype == torch.float32 else 1e-14)

    @pytest.mark.parametrize("block_rows", [1, 3, 9])
    def test_blocks_of_any_height_agree(self, monkeypatch, block_rows):
        batch = dense_captions(29)
        monkeypatch.setattr(tiles, "CACHED_BLOCK_BYTES", block_rows * 29 * 8)
        for rows in (7, 29):
            assert relative_error(evaluate(batch, memory_budget=strips_of(rows, batch)), formula(batch, 0.5)) < 1e-10

    def test_a_budget_below_one_row_still_works(self):
        batch = dense_captions(5)
        assert relative_error(evaluate(batch, memory_budget=1), formula(batch, 0.5)) < 1e-10

    def test_nothing_quadratic_is_saved_for_backward(self):
        N, D = 512, 8
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            loss = HNClipLoss()(*dense_captions(N, dim=D, dtype=torch.float32).leaves())
        assert sum(tensor.numel() for tensor in saved) == 2 * N * D + 1
        assert sum(tensor.untyped_storage().nbytes() for tensor in saved) == 4 * (2 * N * D + 1)
        loss.backward()

    def test_peak_memory_follows_the_budget_not_the_square_of_the_batch(self):
        N, D, budget = 2048, 8, 2**20
        leaves = dense_captions(N, dim=D, dtype=torch.float32).leaves()
        peak = peak_bytes(lambda: HNClipLoss(memory_budget=budget)(*leaves).backward())
        assert budget / 2 < peak < budget + 10 * 4 * N * D  # one N x N matrix takes 16 MiB

    def test_no_gradient_no_second_pass(self, monkeypatch):
        monkeypatch.setattr("pipeline.objective.tiles.Tiles.gradients", pytest.fail)
        leaves = dense_captions(9).leaves()
        with torch.no_grad():
            loss = HNClipLoss()(*leaves)
        assert not loss.requires_grad
        assert not HNClipLoss()(*(leaf.detach() for leaf in leaves)).requires_grad

    @pytest.mark.parametrize("frozen", [{"image"}, {"text"}, {"scale"}, {"image", "text"}, {"image", "scale"}])
    def test_frozen_inputs_leave_the_other_gradients_alone(self, frozen):
        expected = formula(dense_captions(9), 0.5)
        leaves = dense_captions(9).leaves()
        for name in frozen:
            getattr(leaves, name).requires_grad_(False)
        HNClipLoss()(*leaves).backward()
        for name, leaf in leaves._asdict().items():
            if name in frozen:
                assert leaf.grad is None
            else:
                assert torch.allclose(leaf.grad, getattr(expected, name), rtol=1e-10)


class TestRepeatedIds:
    def test_pairs_with_equal_id_are_no_negatives_of_each_other(self):
        batch, ids = dense_captions(12), torch.tensor([5, 1, 2, 5, 3, 4, 5, 6, 7, 8, 1, 9])
        found = evaluate(batch, ids=ids)
        assert relative_error(found, formula(batch, 0.5, ids)) < 1e-10
        assert relative_error(found, formula(batch, 0.5)) > 1e-3

    def test_unique_ids_change_nothing(self):
        batch = dense_captions(12)
        for a, b in zip(evaluate(batch, ids=torch.arange(12)), evaluate(batch), strict=True):
            assert torch.equal(a, b)

    def test_a_batch_of_one_repeated_sample_has_no_loss(self):
        batch = dense_captions(4)
        found = evaluate(batch, ids=torch.zeros(4, dtype=torch.int64))
        assert all(tensor.count_nonzero() == 0 for tensor in found)


class TestProperties:
    @settings(max_examples=25, deadline=None)
    @given(st.permutations(range(10)), st.floats(-1, 1), st.floats(0.5, 100))
    def test_the_order_of_the_pairs_does_not_matter(self, order, gamma, scale):
        batch = dense_captions(10, scale=scale)
        plain = evaluate(batch, gamma)
        permuted = evaluate(Batch(batch.image[order], batch.text[order], batch.scale), gamma)
        expected = Outcome(plain.loss, plain.image[order], plain.text[order], plain.scale)
        assert relative_error(permuted, expected) < 1e-10

    @settings(max_examples=25, deadline=None)
    @given(st.integers(2, 24), st.integers(1, 12), st.floats(0.5, 100), st.integers(1, 24))
    def test_gamma_0_is_clip_loss(self, num_pairs, dim, scale, rows):
        batch = dense_captions(num_pairs, dim=dim, scale=scale)
        leaves = batch.leaves()
        expected = outcome(ClipLoss()(*leaves), leaves)
        found = evaluate(batch, 0.0, memory_budget=strips_of(rows, batch))
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-11)

    @settings(max_examples=25, deadline=None)
    @given(st.floats(-2, 2), st.floats(0.5, 100))
    def test_identical_captions_make_the_margin_a_constant_that_softmax_sees_only_on_the_diagonal(self, gamma, scale):
        """All captions equal: S_ij does not depend on j, so every negative is `gamma * scale` above its positive."""
        batch = dense_captions(8, scale=scale)
        text = batch.text[:1].expand(8, -1)
        loss = HNClipLoss(gamma)(batch.image, text, batch.scale)
        row = torch.log1p(7 * torch.exp(torch.tensor(gamma * scale, dtype=torch.float64)))
        logits = scale * (batch.image @ text[0])
        z = logits[:, None] + gamma * scale * (1 - torch.eye(8, dtype=torch.float64))
        column = torch.nn.functional.cross_entropy(z.T, torch.arange(8))
        assert loss.item() == pytest.approx(((row + column) / 2).item(), rel=1e-9)

    @settings(max_examples=20, deadline=None)
    @given(st.floats(0.5, 100))
    def test_a_larger_gamma_is_a_larger_loss_where_all_captions_are_alike(self, scale):
        batch = dense_captions(8, scale=scale)
        losses = [HNClipLoss(gamma)(*batch).item() for gamma in (-0.5, 0.0, 0.25, 0.5, 1.0)]
        assert all(a < b for a, b in pairwise(losses))


class TestInterface:
    def test_scale_may_be_a_float_or_have_no_dimension(self):
        image, text, scale = dense_captions(7)
        expected = HNClipLoss()(image, text, scale)
        assert HNClipLoss()(image, text, 100.0) == expected
        assert HNClipLoss()(image, text, scale[0]) == expected
        assert expected.shape == ()

    def test_the_gradient_of_the_scale_has_its_shape_and_dtype(self):
        image, text, _ = dense_captions(7, dtype=torch.bfloat16)
        for scale in (torch.tensor(9.0), torch.tensor([9.0], dtype=torch.float64)):
            HNClipLoss()(image, text, scale.requires_grad_()).backward()
            assert scale.grad.shape == scale.shape
            assert scale.grad.dtype == scale.dtype

    def test_output_dict_as_in_open_clip(self):
        batch = dense_captions(7)
        assert HNClipLoss()(*batch, output_dict=True) == {"contrastive_loss": HNClipLoss()(*batch)}

    def test_autocast_does_not_reach_the_logits(self):
        batch = dense_captions(16, dtype=torch.float32)
        expected = evaluate(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = evaluate(batch)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)

    def test_default_gamma_is_the_papers(self):
        assert repr(HNClipLoss()) == "HNClipLoss(gamma=0.5)"

    def test_a_second_derivative_is_refused(self):
        leaves = dense_captions(5).leaves()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(HNClipLoss()(*leaves), leaves.image, create_graph=True)

    def test_the_example_of_the_docstring_runs(self):
        assert doctest.testmod(hn_clip).failed == 0

    @pytest.mark.parametrize("gamma", [float("nan"), float("inf")])
    def test_gamma_must_be_finite(self, gamma):
        with pytest.raises(ValueError, match="gamma must be a finite number"):
            HNClipLoss(gamma)

    def test_budget_must_be_positive(self):
        with pytest.raises(ValueError, match="bytes above 0"):
            HNClipLoss(memory_budget=0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"text_features": torch.ones(3, 4)}, r"not \[4, 4\] and \[3, 4\]"),
            ({"image_features": torch.ones(4), "text_features": torch.ones(4)}, r"must both be \[n, D\]"),
            ({"image_features": torch.ones(0, 4), "text_features": torch.ones(0, 4)}, r"must both be \[n, D\]"),
            ({"text_features": torch.ones(4, 4).double()}, "torch.float32 and torch.float64: cast"),
            ({"image_features": torch.ones(4, 4).int(), "text_features": torch.ones(4, 4).int()}, "share one dtype"),
            ({"text_features": torch.ones(4, 4, device="meta")}, "cpu but text_features on meta"),
            ({"logit_scale": torch.ones(2)}, r"logit_scale must be one .* not \[2\]"),
            ({"logit_scale": torch.ones(1, dtype=torch.int64)}, "logit_scale must be one floating-point"),
            ({"ids": torch.ones(4)}, "ids must be int64"),
            ({"ids": torch.ones(3, dtype=torch.int64)}, r"ids must be int64 of shape \[4\]"),
            ({"ids": torch.ones(4, dtype=torch.int64, device="meta")}, "ids are on meta"),
        ],
    )
    def test_unusable_inputs_are_refused_with_the_cause(self, change, message):
        inputs = {"image_features": torch.ones(4, 4), "text_features": torch.ones(4, 4), "logit_scale": torch.ones(1)}
        with pytest.raises(ValueError, match=message):
            HNClipLoss()(**{**inputs, **change})
