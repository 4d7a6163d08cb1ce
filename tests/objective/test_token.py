"""The token term against a loop over pairs in float64: value, gradients, tiles, masks, ranks, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.objective.token import TokenLoss
from tests.objective.token_cases import Tokens, make_tokens, plain_token_loss
from tests.ranks import Ranks


def _expected(tokens: Tokens, ids: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    leaves = Tokens(tokens.image.double(), tokens.text.double(), tokens.mask, tokens.scale.double()).leaves()
    loss = plain_token_loss(leaves, ids)
    return loss.detach(), leaves.gradients(loss)


def _check(tokens: Tokens, ids: Tensor | None = None, budget: int = 1 << 20, tolerance: float = 1e-12) -> None:
    value, gradients = _expected(tokens, ids)
    leaves = tokens.leaves()
    loss = TokenLoss(tile_budget=budget)(*leaves, ids=ids)
    assert abs(loss.double() - value) < tolerance * value
    for found, expected in zip(leaves.gradients(loss), gradients, strict=True):
        assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("budget", [1, 500, 4000, 1 << 30])
def test_value_and_gradients_are_the_formula_whatever_the_tiles(budget: int) -> None:
    _check(make_tokens(5, 7, 6, 8, torch.float64), budget=budget)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """bf16 tokens: similarities and logits are fp32, so only the gradients are rounded."""
    _check(make_tokens(6, 5, 7, 16, dtype), tolerance=tolerance)


def test_equal_ids_are_no_negatives() -> None:
    _check(make_tokens(5, 4, 6, 8, torch.float64), ids=torch.tensor([3, 1, 3, 2, 1]))


def test_a_caption_without_words_is_as_similar_as_zero_to_every_image() -> None:
    tokens = make_tokens(4, 5, 6, 8, torch.float64)
    tokens.mask[2] = False
    _check(tokens)


def test_tokens_that_are_no_words_have_no_influence() -> None:
    tokens = make_tokens(4, 5, 6, 8)
    noisy = tokens._replace(text=torch.where(tokens.mask[..., None], tokens.text, 100.0))
    assert torch.equal(TokenLoss()(*tokens), TokenLoss()(*noisy))
    leaves = tokens.leaves()
    text = leaves.gradients(TokenLoss()(*leaves))[1]
    assert not text[~tokens.mask].any()
    assert text[tokens.mask].any(dim=-1).all()


def test_one_image_and_one_word_by_hand() -> None:
    """Two pairs; every patch of an image is alike. s (cos 0.6, 0) against (0, 0.8): both losses are softplus."""
    x = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64).expand(2, 3, 2)
    y = torch.tensor([[[0.6, 0.8]], [[0.0, 1.0]]], dtype=torch.float64)
    mask = torch.ones(2, 1, dtype=torch.bool)
    gaps = torch.tensor([[0.0 - 0.6, 0.8 - 1.0], [0.8 - 0.6, 0.0 - 1.0]], dtype=torch.float64)
    expected = torch.log1p(torch.exp(10 * gaps)).mean()
    torch.testing.assert_close(TokenLoss()(x, y, mask, 10.0), expected)


def _on_rank(num_pairs: int, with_ids: bool) -> tuple[float, list[Tensor]]:
    """This rank's gradients; its captions are as short as they can be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = make_tokens(num_pairs, 5, 6, 8, torch.float64)
    own = slice(rank * num_pairs // world, (rank + 1) * num_pairs // world)
    length = int(tokens.mask[own].any(0).nonzero().max()) + 1
    leaves = Tokens(tokens.image[own], tokens.text[own, :length], tokens.mask[own, :length], tokens.scale).leaves()
    ids = torch.arange(num_pairs)[own] % (num_pairs - 1) if with_ids else None
    loss = TokenLoss()(*leaves, ids=ids)
    image, text, scale = leaves.gradients(loss)
    padded = torch.nn.functional.pad(text, (0, 0, 0, 6 - length))
    return loss.item(), [image / world, padded / world, scale]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("with_ids", [False, True])
def test_over_ranks_it_is_the_loss_of_one_process(world: int, with_ids: bool, ranks: Ranks) -> None:
    ids = torch.arange(8) % 7 if with_ids else None
    value, (image, text, scale) = _expected(make_tokens(8, 5, 6, 8, torch.float64), ids)
    results = ranks(world).run(_on_rank, 8, with_ids)
    assert [loss for loss, _ in results] == pytest.approx([value.item()] * world, rel=1e-12)
    torch.testing.assert_close(torch.cat([g[0] for _, g in results]), image)
    torch.testing.assert_close(torch.cat([g[1] for _, g in results]), text)
    torch.testing.assert_close(sum(g[2] for _, g in results) / world, scale)


def _unequal() -> str:
    tokens = make_tokens(3 + dist.get_rank(), 5, 6, 8)
    with pytest.raises(ValueError, match="number of pairs of the token term differs between the ranks") as error:
        TokenLoss()(*tokens)
    return str(error.value)


def test_unequal_batches_raise_on_every_rank(ranks: Ranks) -> None:
    assert all("[3, 4]" in message for message in ranks(2).run(_unequal))


def test_inputs_that_cannot_be_used_are_named() -> None:
    image, text, mask, scale = make_tokens(3, 5, 6, 8)
    with pytest.raises(ValueError, match=r"must be \[n, P, D\]"):
        TokenLoss()(image[:2], text, mask, scale)
    with pytest.raises(ValueError, match="share a floating-point dtype"):
        TokenLoss()(image.double(), text, mask, scale)
    with pytest.raises(ValueError, match=r"text_mask must be bool \[3, 6\]"):
        TokenLoss()(image, text, mask.long(), scale)
    with pytest.raises(ValueError, match=r"ids must be int64 \[3\]"):
        TokenLoss()(image, text, mask, scale, ids=torch.zeros(3))
    with pytest.raises(ValueError, match="tile_budget"):
        TokenLoss(tile_budget=0)


_PEAK = """
import torch
from pipeline.objective.token import TokenLoss
from tests.resident import peak_resident_bytes
B, P, L, D = 128, 256, 248, 32
torch.manual_seed(0)
image, text = (torch.nn.functional.normalize(torch.randn(B, k, D), dim=-1).requires_grad_() for k in (P, L))
mask = torch.arange(L).expand(B, L) < L - 1
TokenLoss()(image[:2], text[:2], mask[:2], 20.0).backward()  # what libraries allocate once
before = peak_resident_bytes()
TokenLoss()(image, text, mask, 20.0).backward()
print(peak_resident_bytes() - before)
"""


def test_128_long_captions_and_256_patches_stay_under_600_mb() -> None:
    """The tensor of all similarities alone would take 4.2 GB."""
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True, cwd=here)
    assert 10e6 < int(done.stdout) < 600e6
