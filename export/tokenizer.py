"""The `tokenizer.json` of any model, whichever tokenizer it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from export.captions import CLEANING_KEY, ZEROED_KEY
from export.manifest import TOKENIZER, TOKENIZER_CONFIG
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.runs import write_json

# SimpleTokenizer's own pattern, with the effects of its ignore-case flag spelled out: U+017F is another lower-case s,
# and U+0345, which folds to a letter without being one, belongs to no word.
_CLIP_WORDS = r"'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|\p{L}+|\p{N}|[^\s\p{L}\p{N}\u0345]+"


def write_tokenizer(spec: dict[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Args:
        spec: the model's open_clip configuration, see `DualEncoder.spec`.
        folder: a bundle in the making.

    Raises:
        ValueError: the tokenizer has no form that the runtime can read.
    """
    captions = CaptionTokenizer(spec)
    options = spec["model_cfg"]["text_cfg"].get("tokenizer_kwargs", {})
    own = captions.tokenizer
    if isinstance(own, SimpleTokenizer):
        clean = options.get("clean", "lower")
        tokenizer, zeroed = clip_tokenizer(own, lower=clean != "whitespace"), []
    else:
        clean = options.get("clean", "whitespace")
        tokenizer, zeroed = _hugging_face_tokenizer(own), [own.tokenizer.sep_token_id] if own.strip_sep_token else []
    tokenizer.enable_truncation(captions.context_length)
    pad_token = tokenizer.id_to_token(captions.pad_id)
    tokenizer.enable_padding(pad_id=captions.pad_id, pad_token=pad_token)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": captions.context_length,
        "pad_token": pad_token,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        CLEANING_KEY: clean,
        ZEROED_KEY: zeroed,
    }
    write_json(folder / TOKENIZER_CONFIG, config)


def clip_tokenizer(own: SimpleTokenizer, lower: bool = True) -> Tokenizer:
    """CLIP's byte-pair encoding as a `tokenizers` tokenizer: [start] pieces [end], the end kept when truncated.

    Two kinds of caption get other ids than from SimpleTokenizer: one that spells out a special token right behind other
    punctuation (`!!<start_of_text>`), and one with characters that are new in Unicode 15 or later, where the `regex`
    module and this library may disagree on what a letter is.

    Args:
        own: open_clip's tokenizer.
        lower: whether letter case is dropped.
    """
    if own.reduction_fn is not None:
        raise ValueError("a tokenizer with a reduction_mask drops tokens at random, which serving cannot repeat")
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)
    tokenizer = Tokenizer(BPE(vocab=own.encoder, merges=merges, end_of_word_suffix="</w>"))
    if lower:
        tokenizer.normalizer = Lowercase()
    split = Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    special = [own.decoder[i] for i in own.all_special_ids]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    start, end = special[:2]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, own.sot_token_id), (end, own.eot_token_id)]
    )
    return tokenizer


def _hugging_face_tokenizer(own: HFTokenizer) -> Tokenizer:
    """The tokenizer that a fast Hugging Face tokenizer wraps, as a copy."""
    backend = getattr(own.tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or own.tokenizer_mode:
        raise ValueError(
            f"{type(own.tokenizer).__name__} {own.tokenizer_mode} has no fast form, so it cannot be written as "
            f"{TOKENIZER}; use a model whose tokenizer ships one"
        )
    return Tokenizer.from_str(backend.to_str())
