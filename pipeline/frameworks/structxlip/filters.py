"""A caption without its words of colour, material and texture, so that what is left says what an edge map shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pipeline.frameworks.structxlip.lexicons import LEXICONS

LEAST_CONTENT = 2  # words beside those of STOP_WORDS; a caption of fewer stays as it was
_STOP_WORDS = "a, an, the, this, it, its, and, or, but, is, are, of, in, on, at, to, with, by, for, from"
STOP_WORDS = frozenset(re.findall(r"\w+", _STOP_WORDS))
# What joins terms goes with them: "red and white", "black-and-white", "smooth, shiny".
_JOINT = r"(?:\s*,\s*(?:and\s+|or\s+)?|\s+(?:and|or)\s+|[\s-]+and[\s-]+|\s*[/&-]\s*|\s+)"
_SUFFIX = r"(?:[\s-]+(?:colou?red|toned|tinted|hued))?"
_TIDY = (
    (re.compile(r"\(\s*\)"), ""),
    (re.compile(r"\s+(?=[.,;:!?)])"), ""),
    (re.compile(r",(?:\s*,)+"), ","),
    (re.compile(r",(?=[.;:!?])|(?<=[.;:!?]),|^\s*[,;:]+"), ""),
    (re.compile(r"\s+"), " "),
)


def phrases_of(lexicons: Sequence[str]) -> list[str]:
    """The phrases of lexicons, by name or out of a text file with one in a line.

    Raises:
        ValueError: none has that name, and no such file can be read.
    """
    phrases: list[str] = []
    for name in lexicons:
        if name in LEXICONS:
            phrases += LEXICONS[name]
            continue
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"framework.lexicons: '{name}' is none of {', '.join(LEXICONS)}, nor a text file of phrases ({error})"
            ) from error
        phrases += [line.strip() for line in lines if line.strip()]
    return phrases


class CaptionFilter:
    """Takes phrases out of captions: whole words of any case, the longest phrase first, a hyphen as good as a space.

    Args:
        phrases: to take out; none leaves captions as they are.
    """

    def __init__(self, phrases: Sequence[str]) -> None:
        self._terms: re.Pattern[str] | None = None
        if phrases:
            term = rf"(?:{_one_of(phrases)}){_SUFFIX}"
            self._terms = re.compile(rf"(?<![\w'])(?:{term})(?:{_JOINT}(?:{term}))*(?![\w'])", re.IGNORECASE)

    def __call__(self, caption: str) -> str:
        """The caption without them, single spaces between its words; the whole one where too little would be left."""
        whole = " ".join(caption.split())
        if self._terms is None:
            return whole
        left = self._terms.sub("", whole)
        for pattern, replacement in _TIDY:
            left = pattern.sub(replacement, left)
        left = left.strip()
        return left if num_content_words(left) >= LEAST_CONTENT else whole


def num_content_words(text: str) -> int:
    """Words that say something."""
    return sum(word not in STOP_WORDS for word in re.findall(r"\w+", text.lower()))


def _one_of(phrases: Sequence[str]) -> str:
    """A pattern of phrases, the longest first; by their first letters, or each word would be compared with them all."""
    longest_first = sorted({phrase.lower() for phrase in phrases}, key=lambda phrase: (phrase[0], -len(phrase), phrase))
    by_letter = groupby(longest_first, key=lambda phrase: phrase[0])
    return "|".join(
        f"(?={re.escape(letter)})(?:{'|'.join(_words(phrase) for phrase in group)})" for letter, group in by_letter
    )


def _words(phrase: str) -> str:
    return r"[\s-]+".join(map(re.escape, re.split(r"[\s-]+", phrase))) + r"\b"
