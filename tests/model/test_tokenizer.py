"""Captions to ids: cutting to the batch's longest changes nothing, and no caption loses its end token."""

from __future__ import annotations

import open_clip
import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.model import build_model
from pipeline.model.tokenizer import CaptionTokenizer
from tests.fixtures import minilm_text_cfg, tiny_clip, write_tiny_clip

START, END = 49406, 49407  # CLIP's byte-pair vocabulary
CAPTIONS = ["a red bus", "two dogs that run on wet sand", "!", ""]
LONG = "one more word and " * 30


def full_context_features(model, captions):
    """What the tower gives for the padded ids of open_clip's own tokenizer."""
    ids = open_clip.tokenize(captions, context_length=model.context_length)
    assert ids.shape[1] == model.context_length
    with torch.no_grad():
        return model(input_ids=ids).text_features


def features(model, tokenizer, captions):
    with torch.no_grad():
        return model(input_ids=tokenizer(captions)).text_features


def test_ids_are_open_clips_cut_to_the_longest(tmp_path):
    model = tiny_clip(tmp_path)
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    padded = open_clip.tokenize(CAPTIONS, context_length=20)
    assert ids.shape == (4, 9)  # start, seven words, end
    assert torch.equal(ids, padded[:, :9])
    assert not padded[:, 9:].any()
    assert ids.dtype == torch.int64
    assert ids.is_contiguous()


@pytest.mark.parametrize(
    "text",
    [{}, {"pool_type": "eos", "eos_id": END}, {"no_causal_mask": True}, {"pool_type": "last"}, {"embed_cls": True}],
    ids=["clip", "eos", "bidirectional", "last", "class-token"],
)
def test_a_caption_has_the_same_features_in_any_batch(tmp_path, text):
    """Towers that look at padding (SigLIP, CLIPA, MobileCLIP, CoCa) must not have it cut off."""
    model = tiny_clip(tmp_path, **text)
    expected = full_context_features(model, CAPTIONS)
    tokenizer = CaptionTokenizer(model.spec)
    torch.testing.assert_close(features(model, tokenizer, CAPTIONS), expected)
    for number, caption in enumerate(CAPTIONS):
        torch.testing.assert_close(features(model, tokenizer, [caption]), expected[number : number + 1])
    assert (expected[0] - expected[1]).abs().max() > 1e-3


def test_a_caption_that_fills_the_context_or_more_keeps_its_end_token(tmp_path):
    model = tiny_clip(tmp_path)
    fits = " ".join(["word"] * 18)  # with start and end exactly 20
    tokenizer = CaptionTokenizer(model.spec)
    ids = tokenizer([fits, LONG, "short"])
    assert ids.shape == (3, 20)
    assert ids[:, 0].tolist() == [START] * 3
    assert ids[:2, -1].tolist() == [END] * 2
    assert (ids == END).sum(dim=1).tolist() == [1, 1, 1]
    torch.testing.assert_close(features(model, tokenizer, [fits, LONG]), full_context_features(model, [fits, LONG]))


def test_a_shorter_context_of_the_recipe_cuts_captions_and_keeps_the_end_token(tmp_path):
    name = write_tiny_clip(tmp_path / "tiny.json")
    model = build_model(ModelConfig(name=name, context_length=7))
    assert model.context_length == model.spec["context_length"] == 7
    ids = CaptionTokenizer(model.spec)([LONG, "a bus"])
    assert ids.shape == (2, 7)
    assert ids[0].tolist()[-1] == END
    assert model(input_ids=ids).text_features.shape == (2, 16)
    assert model.clip.text.positional_embedding.shape[0] == 20  # the weights stay whole


def test_captions_that_lose_their_end_are_counted(tmp_path):
    model = tiny_clip(tmp_path)
    tokenizer = CaptionTokenizer(model.spec)
    exactly, one_more = " ".join(["word"] * 18), " ".join(["word"] * 19)
    ids, cut = tokenizer.with_cut([exactly, one_more, "short", LONG, ""])
    assert cut.tolist() == [False, True, False, True, False]
    assert (ids[:4] == END).sum(dim=1).tolist() == [1] * 4
    tokenizer(["short", LONG])
    assert (tokenizer.num_captions, tokenizer.num_cut) == (7, 3)


def test_the_same_of_a_hugging_face_tower(tmp_path):
    """Features are those of the padded ids, the last token of a caption that was cut is its end token, [SEP]."""
    model = tiny_clip(tmp_path, **minilm_text_cfg())
    tokenizer = CaptionTokenizer(model.spec)
    captions = [*CAPTIONS, " ".join(["word"] * 18)]
    ids, cut = tokenizer.with_cut(captions)
    assert not cut.any()
    padded = tokenizer.tokenizer(captions)
    assert ids.shape == padded.shape == (5, 20)
    short, _ = tokenizer.with_cut(CAPTIONS)
    assert short.shape == (4, 9)
    with torch.no_grad():
        expected = model(input_ids=padded).text_features
        torch.testing.assert_close(model(input_ids=short).text_features, expected[:4])
    ids, cut = tokenizer.with_cut([LONG, "a bus", " ".join(["word"] * 19)])
    assert cut.tolist() == [True, False, True]
    assert ids[:, -1].tolist() == [102, 0, 102]
