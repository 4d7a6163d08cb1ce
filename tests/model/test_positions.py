"""Longer contexts by Long-CLIP's rule, against its formula written out row by row in float64; rows that stay."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.model import build_model, load_checkpoint
from pipeline.model.positions import freeze_positions, position_table, stretch, stretch_table
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.train.optim import make_optimizer
from pipeline.training_sections import OptimizerConfig
from tests.fixtures import minilm_text_cfg, tiny_clip, write_tiny_clip
from tests.model import official


def by_formula(old: torch.Tensor, keep: int, factor: int) -> torch.Tensor:
    """new[keep + f i + r] = ((f - r) old[keep + i] + r old[keep + i + 1]) / f; the last f rows extrapolate."""
    old, n = old.double(), len(old)
    rows = [old[i] for i in range(keep)]
    for i in range(n - 1 - keep):
        rows += [((factor - r) * old[keep + i] + r * old[keep + i + 1]) / factor for r in range(factor)]
    rows += [old[n - 1] + r / factor * (old[n - 1] - old[n - 2]) for r in range(factor)]
    return torch.stack(rows)


@pytest.mark.parametrize(("n", "keep", "factor"), [(77, 20, 4), (77, 20, 2), (77, 0, 3), (9, 7, 5), (77, 20, 1)])
def test_the_rule_of_long_clip(n, keep, factor):
    old = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    length = keep + factor * (n - keep)
    new = stretch_table(old, length, keep)
    assert new.shape == (length, 5)
    torch.testing.assert_close(new.double(), by_formula(old, keep, factor), atol=1e-6, rtol=0)
    assert torch.equal(new[:keep], old[:keep])
    if (n, keep, factor) == (77, 20, 4):
        assert length == 248


def test_other_lengths_are_the_first_rows_of_the_next_table():
    old = torch.randn(77, 4)
    for length in (78, 100, 134, 135, 200):
        factor = 2 if length <= 134 else 4 if length > 191 else 3
        torch.testing.assert_close(
            stretch_table(old, length).double(), by_formula(old, 20, factor)[:length], atol=1e-6, rtol=0
        )


def test_a_stretched_clip_reads_248_tokens_and_is_read_again(tmp_path):
    state = official.random_state()
    torch.save(state, tmp_path / "w.pt")
    model = build_model(ModelConfig(name=str(tmp_path / "w.pt"), context_length=248)).eval()
    state["positional_embedding"] = by_formula(state["positional_embedding"], 20, 4)
    captions = ["a red bus", "so " * 300]
    tokenizer = CaptionTokenizer(model.spec)
    ids, cut = tokenizer.with_cut(captions)
    assert ids.shape == (2, 248)
    assert cut.tolist() == [False, True]
    assert ids[1, -1] == 49407
    with torch.no_grad():
        expected = official.encode_text(state, ids, official.gelu)
        torch.testing.assert_close(model.encode_text(ids).double(), expected, atol=1e-4, rtol=1e-5)
    torch.save(model.encoder_state(), tmp_path / "again.pt")
    assert load_checkpoint(tmp_path / "again.pt")[0].context_length == 248


def test_the_weights_of_a_recipe_are_stretched_after_they_are_loaded(tmp_path):
    name = write_tiny_clip(tmp_path / "tiny.json")
    torch.manual_seed(0)
    short = build_model(ModelConfig(name=name))
    from pipeline.model.formats import Weights

    init = Weights(tmp_path, "test", short.spec, short.encoder_state())
    long = build_model(ModelConfig(name=name, context_length=50, keep_positions=5), init)
    expected = by_formula(short.clip.text.positional_embedding.detach(), 5, 3)
    torch.testing.assert_close(long.clip.text.positional_embedding.double(), expected, atol=1e-6, rtol=0)
    assert long.clip.text.attn_mask.shape == (50, 50)


# rows that stay -------------------------------------------------------------------------------------------------------


def test_frozen_rows_stay_bitwise_with_weight_decay_while_the_others_move(tmp_path):
    model = tiny_clip(tmp_path)
    table = position_table(model.clip.text)
    before = table.detach().clone()
    freeze_positions(model.clip.text, 7)
    optimizer = make_optimizer(model.clip, OptimizerConfig(lr=0.1, weight_decay=0.5))
    ids = CaptionTokenizer(model.spec)(["a red bus in a long street with many words until the end"])
    for _ in range(5):
        optimizer.zero_grad()
        model.encode_text(ids).square().sum().backward()
        assert not table.grad[:7].any()
        optimizer.step()
    assert torch.equal(table[:7], before[:7])
    assert (table[7:10] != before[7:10]).all()
    decayed = [g["weight_decay"] for g in optimizer.param_groups if any(p is table for p in g["params"])]
    assert decayed == [0.0]


def test_a_hugging_face_tower_has_a_table_and_a_wrong_count_is_refused(tmp_path):
    model = tiny_clip(tmp_path)
    for count in (0, 20, 21):
        with pytest.raises(ValueError, match=rf"freeze_positions is {count}, .* has 20 positions"):
            freeze_positions(model.clip.text, count)
    model.clip.text.positional_embedding.requires_grad_(False)
    with pytest.raises(ValueError, match=r"freeze_positions is 3, but the whole table is frozen"):
        freeze_positions(model.clip.text, 3)
    model = tiny_clip(tmp_path, **minilm_text_cfg())
    assert position_table(model.clip.text).shape[0] == 512
    freeze_positions(model.clip.text, 3)
    model.encode_text(CaptionTokenizer(model.spec)(["a red bus"])).sum().backward()
    rows = position_table(model.clip.text).grad.abs().sum(1)
    assert (rows[:3] == 0).all()
    assert rows[3] > 0


def test_a_hugging_face_tower_reads_as_many_tokens_as_it_has_positions(tmp_path):
    """BERT has 512 of them, and open_clip cuts captions to 77; its table is no table of open_clip's to stretch."""
    name = write_tiny_clip(tmp_path / "bert.json", **minilm_text_cfg())
    model = build_model(ModelConfig(name=name, context_length=248)).eval()
    ids = CaptionTokenizer(model.spec)(["a red bus " * 200])
    assert ids.shape == (1, 248)
    inner = model.clip.text.transformer
    with torch.no_grad():
        found = inner(input_ids=ids).last_hidden_state.mean(1)
        torch.testing.assert_close(model.encode_text(ids), model.clip.text.proj(found), atol=1e-5, rtol=0)
    with pytest.raises(
        ValueError, match=r"513, but .* its Hugging Face bert has 512 positions, and only open_clip's own"
    ):
        build_model(ModelConfig(name=name, context_length=513))


def test_a_roberta_counts_its_positions_from_behind_its_padding():
    from open_clip.hf_model import HFTextEncoder
    from transformers import RobertaConfig

    config = RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    text = HFTextEncoder("roberta", 16, config=config, pooler_type="mean_pooler", proj_type="linear", pretrained=False)
    stretch(text, 32)
    text(torch.full((1, 32), 5))
    with pytest.raises(ValueError, match="roberta has 32 positions"):
        stretch(text, 33)
    with pytest.raises(IndexError):
        text(torch.full((1, 33), 5))
