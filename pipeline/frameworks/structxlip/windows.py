"""Windows of words over the clauses of a caption, and which of its tokens each of them is.

Tokenizers join and split words in their own ways, and not all of them report offsets. The tokens of a caption are as a
rule those of its words, one after the other, so each word is tokenized once and kept. Where they are not, the tokens of
the caption's beginnings, longer by one word each, tell where words end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords

_CLAUSE_END = re.compile(r"[.,;!?]+[\"'”’)\]]*$")
_MOST_WORDS_KEPT = 100_000

Place = tuple[int, int]


def window_size(num_words: int, base: int) -> int:
    """Words in a window over a clause of so many: 2 up to 4 words, `base` up to 10, then 1, 2 and 3 more."""
    if num_words <= 4:
        return 2
    return base + sum(num_words > longest for longest in (10, 20, 40))


def windows(words: Sequence[str], base: int, stride: int, most: int) -> list[Place]:
    """First and one past the last word of each window, the first `most` of a caption.

    A clause ends with a word that a full stop, comma, semicolon, exclamation or question mark follows. One of fewer
    words than its window has none.
    """
    found: list[Place] = []
    start = 0
    for past, word in enumerate(words, 1):
        if past < len(words) and not _CLAUSE_END.search(word):
            continue
        size = window_size(past - start, base)
        found += [(first, first + size) for first in range(start, past - size + 1, stride)]
        start = past
    return found[:most]


class WordTokens:
    """Finds the tokens of words; knows those that it has seen.

    Args:
        no_words: of the tokenizer.
    """

    def __init__(self, no_words: NoWords) -> None:
        self.no_words = no_words
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, captions: Sequence[str], tokenizer: CaptionTokenizer) -> tuple[Tensor, list[list[Place | None]]]:
        """Token ids of captions, and the place of each word among them.

        Args:
            captions: their words are those between spaces.
            tokenizer: the model's.

        Returns:
            int64 [B, L], and of each word first and one past the last token, without the marks that end a clause. None
            for words beyond the context, and for those that are no tokens of their own.
        """
        ids, cut = tokenizer.with_cut(captions)
        words = self.no_words.words(ids)
        first = words.int().argmax(1).tolist()
        spoken = [caption.split() for caption in captions]
        self._learn({form for caption in spoken for word in caption for form in (word, _bare(word))}, tokenizer)
        places = []
        for row, caption in enumerate(spoken):
            tokens = tuple(ids[row][words[row]].tolist())
            within = self._by_word(caption, tokens, bool(cut[row]))
            if within is None:
                within = self._by_beginning(caption, tokens, tokenizer)
            places.append([place and (place[0] + first[row], place[1] + first[row]) for place in within])
        return ids, places

    def _learn(self, words: Iterable[str], tokenizer: CaptionTokenizer) -> None:
        if len(self._known) > _MOST_WORDS_KEPT:
            self._known.clear()
        new = [word for word in words if word not in self._known]
        self._known.update(zip(new, self._contents(new, tokenizer), strict=True))

    def _contents(self, texts: Sequence[str], tokenizer: CaptionTokenizer) -> list[tuple[int, ...]]:
        """The tokens of texts without special ones."""
        if not texts:
            return []
        ids = tokenizer(texts)
        return [tuple(row[words].tolist()) for row, words in zip(ids, self.no_words.words(ids), strict=True)]

    def _by_word(self, words: Sequence[str], tokens: tuple[int, ...], cut: bool) -> list[Place | None] | None:
        """Places of words whose tokens, one word after the other, are the caption's; None: they are not."""
        joined = [token for word in words for token in self._known[word]]
        if tuple(joined[: len(tokens)]) != tokens or (len(joined) != len(tokens) and not cut):
            return None
        places: list[Place | None] = []
        start = 0
        for word in words:
            own, bare = self._known[word], self._known[_bare(word)]
            past = start + (len(bare) if bare and own[: len(bare)] == bare else len(own))
            places.append((start, past) if start < past <= len(tokens) else None)
            start += len(own)
        return places

    def _by_beginning(
        self, words: Sequence[str], tokens: tuple[int, ...], tokenizer: CaptionTokenizer
    ) -> list[Place | None]:
        """Places by the tokens of the caption's beginnings, where these begin the caption's; marks count as words."""
        beginnings = self._contents([" ".join(words[:past]) for past in range(1, len(words) + 1)], tokenizer)
        places: list[Place | None] = []
        start: int | None = 0
        for beginning in beginnings:
            past = len(beginning) if beginning == tokens[: len(beginning)] else None
            new = start is not None and past is not None and start < past
            places.append((start, past) if new else None)  # type: ignore[arg-type]
            start = past
        return places


def token_windows(found: Sequence[Sequence[Place]], places: Sequence[Sequence[Place | None]]) -> Tensor:
    """int64 [B, S, 2]: first and one past the last token of each window of words; (0, 0) is none."""
    rows = []
    for own, words in zip(found, places, strict=True):
        ends = [(words[first], words[past - 1], words[first:past]) for first, past in own]
        rows.append([(start[0], end[1]) for start, end, whole in ends if start and end and None not in whole])
    spans = torch.zeros(len(rows), max([1, *map(len, rows)]), 2, dtype=torch.int64)
    for row, own_spans in zip(spans, rows, strict=True):
        row[: len(own_spans)] = torch.tensor(own_spans, dtype=torch.int64).reshape(-1, 2)
    return spans


def _bare(word: str) -> str:
    """A word without the marks that end a clause."""
    return _CLAUSE_END.sub("", word)
