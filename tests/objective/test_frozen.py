from __future__ import annotations

import pytest
import torch

from pipeline.objective import FrozenCaptions


def test_rows_are_found_by_key_in_any_order():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**62), 2**62, (200,), generator=generator)
    features = torch.randn(200, 3, generator=generator)
    table = {int(key): row for key, row in zip(keys, features, strict=True)}
    asked = keys[torch.randint(0, 200, (50,), generator=generator)]
    assert torch.equal(FrozenCaptions(keys, features).rows(asked), torch.stack([table[int(key)] for key in asked]))


def test_of_repeated_keys_the_first_counts_and_gradients_stop():
    features = torch.arange(4.0, requires_grad=True)[:, None]
    captions = FrozenCaptions(torch.tensor([7, 1, 7, 3]), features)
    assert captions.rows(torch.tensor([7, 3])).flatten().tolist() == [0.0, 3.0]
    assert not captions.rows(torch.tensor([7])).requires_grad
    assert len(captions) == 4


@pytest.mark.parametrize("num_known", [0, 3])
def test_an_unknown_caption_is_refused(num_known):
    captions = FrozenCaptions(torch.arange(num_known), torch.zeros(num_known, 2))
    with pytest.raises(ValueError, match="1 of 1 captions have no frozen features: encode every caption"):
        captions.rows(torch.tensor([5]))


@pytest.mark.parametrize("keys", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 1).long()])
def test_keys_must_be_one_integer_per_caption(keys):
    with pytest.raises(ValueError, match="one int64 key"):
        FrozenCaptions(keys, torch.zeros(3, 2))
