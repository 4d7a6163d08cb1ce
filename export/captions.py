"""Captions to token ids from a bundle's files, as `pipeline.model.tokenizer` gives them. No torch.

open_clip cleans a caption before it tokenizes: ftfy repairs wrongly decoded text, HTML entities are resolved, white
space is collapsed, and some models drop case or punctuation. No normaliser of the `tokenizers` library can express
ftfy, so this step is plain Python here, with the same ftfy. `tokenizer.json` on its own gives the same ids for any
caption that needs no repair.
"""

from __future__ import annotations

import html
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ftfy
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export.manifest import TOKENIZER, TOKENIZER_CONFIG
from pipeline.runs import read_json

CLEANING_KEY = "caption_cleaning"
ZEROED_KEY = "zeroed_token_ids"

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _repair(text: str) -> str:
    return html.unescape(html.unescape(ftfy.fix_text(text)))


def _whitespace(text: str) -> str:
    return " ".join(_repair(text).split())


def _lower(text: str) -> str:
    return _whitespace(text).lower()


def _canonicalize(text: str) -> str:
    return " ".join(_repair(text).strip().replace("_", " ").translate(_PUNCTUATION).lower().split())


# open_clip's names for the ways to clean, see `open_clip.tokenizer.get_clean_fn`.
CLEANERS: Mapping[str, Callable[[str], str]] = {
    "whitespace": _whitespace,
    "lower": _lower,
    "canonicalize": _canonicalize,
}


class BundleTokenizer:
    """The tokenizer of a bundle.

    Args:
        folder: holds `tokenizer.json`, which truncates and pads, and `tokenizer_config.json`.

    Attributes:
        num_captions, num_cut: captions that this object has tokenized, and those that were longer than the context.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / TOKENIZER_CONFIG)
        self._clean = CLEANERS[config[CLEANING_KEY]]
        self._zeroed = config[ZEROED_KEY]
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self.num_captions = self.num_cut = 0

    def __call__(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """int64 ids [B, L], L the length of the longest caption here, at most the context; shorter ones are padded."""
        encoded = self._tokenizer.encode_batch([self._clean(caption) for caption in captions])
        self.num_captions += len(encoded)
        self.num_cut += sum(bool(caption.overflowing) for caption in encoded)
        ids = np.array([caption.ids for caption in encoded], dtype=np.int64)
        ids[np.isin(ids, self._zeroed)] = 0
        used = np.flatnonzero((ids != self._tokenizer.padding["pad_id"]).any(axis=0))
        return np.ascontiguousarray(ids[:, : used[-1] + 1 if len(used) else 1])
