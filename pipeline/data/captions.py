"""What of a caption a training pair gets: a function of (seed, epoch, id), whatever rank or worker draws it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pipeline.sections import CaptionConfig

# After a full stop, exclamation or question mark, with any closing quotes and brackets, or at a line break. "3.5" and
# "e.g.," stay whole; an abbreviation before a space ends a sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|\s*\n\s*")


def split_sentences(caption: str) -> list[str]:
    """The sentences of a caption, in order, with their marks; one that has none is a sentence itself."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(caption):
        sentences.append(caption[start : match.end()].strip())
        start = match.end()
    sentences.append(caption[start:].strip())
    return [sentence for sentence in sentences if sentence] or [caption]


class CaptionSampler:
    """Draws the caption of a pair.

    Args:
        config: how, see `CaptionConfig`.
        seed: of the run.
    """

    def __init__(self, config: CaptionConfig, seed: int) -> None:
        self.config = config
        self.seed = seed

    def __call__(self, captions: Sequence[str], sample_id: str, epoch: int) -> str:
        """One of the captions, whole or in part; never empty where they are not."""
        draw = random.Random(f"{self.seed}/{epoch}/{sample_id}")
        caption = captions[draw.randrange(len(captions))]
        if self.config.sample == "whole" or draw.random() >= self.config.probability:
            return caption
        sentences = split_sentences(caption)
        return " ".join(sentences[place] for place in self._places(len(sentences), draw))

    def _places(self, count: int, draw: random.Random) -> Sequence[int]:
        """Which of so many sentences, in order."""
        if self.config.sample == "rest":
            return range(1, count) if count > 1 else range(count)
        length = draw.randint(1, count)
        if self.config.sample == "sentences":
            return sorted(draw.sample(range(count), length))
        start = draw.randint(0, count - length)
        return range(start, start + length)
