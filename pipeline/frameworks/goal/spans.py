"""Where a part of a caption stands among the token ids of the whole, for any tokenizer.

Tokenizers clean, merge and add tokens in their own ways, and not all of them report offsets. What all of them share: up
to some end of a word, the tokens of a beginning of a text are the beginning of the text's tokens. So the part starts
where the tokens of what stands before it end, and ends where those of that and the part end. Both are compared with the
tokens of the whole; where they differ, the part has no place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords


def place_in(caption: str, part: str) -> tuple[int, int] | None:
    """First and one past the last character of a part of a caption; of any case and spacing. None: it is not there."""
    words = part.split()
    found = re.search(r"\s+".join(map(re.escape, words)), caption, re.IGNORECASE) if words else None
    return found.span() if found else None


def token_spans(
    captions: Sequence[str], places: Sequence[tuple[int, int] | None], tokenizer: CaptionTokenizer, no_words: NoWords
) -> Tensor:
    """The tokens of a part of each caption.

    Args:
        captions: B whole captions.
        places: of the part's characters, see `place_in`.
        tokenizer, no_words: the model's.

    Returns:
        bool [B, L], L as for the captions' ids. None of a caption whose place is None, or of which the context cuts
        into the part, or whose tokens differ from those of its beginnings.
    """
    known = [place or (0, 0) for place in places]
    before = [caption[:start] for caption, (start, _) in zip(captions, known, strict=True)]
    until = [caption[:end] for caption, (_, end) in zip(captions, known, strict=True)]
    ids, cut = tokenizer.with_cut([*captions, *before, *until])
    words, position = no_words.words(ids), torch.arange(ids.shape[1])
    first = words[: len(captions)].int().argmax(1, keepdim=True)
    past_last = ((position + 1) * words).amax(1, keepdim=True)
    whole, *beginnings = ids.chunk(3)
    start, end = (past.maximum(first) for past in past_last.chunk(3)[1:])
    fits = ~cut.chunk(3)[2][:, None]
    for beginning, past in zip(beginnings, (start, end), strict=True):
        fits = fits & ((beginning == whole) | (position >= past)).all(1, keepdim=True)
    return fits & (position >= start) & (position < end)
