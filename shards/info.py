"""What a set holds: counts, lengths of captions, duplicates, kinds and sizes of pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from shards.contents import content_of
from shards.images import image_facts
from shards.reader import ShardReader
from shards.receipt import MANIFEST, read_receipt
from shards.report import Progress

CONTEXTS = (77, 248)
"""Positions of CLIP's and of Long-CLIP's text encoder, the start and end tokens included."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A summary of the lengths of many captions."""

    mean: float
    median: float
    min: int
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        """The summary of at least one length."""
        return cls(mean(lengths), median(lengths), min(lengths), max(lengths))

    def __str__(self) -> str:
        return f"mean {self.mean:.1f}, median {self.median:g}, {self.min} to {self.max}"


@dataclass(slots=True)
class SplitInfo:
    """One split. `tokens` holds the length of each caption, start and end token included."""

    num_pairs: int = 0
    words: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def share_cut(self, context: int) -> float:
        """The share of captions that do not fit into so many positions."""
        return sum(length > context for length in self.tokens) / len(self.tokens)

    def lines(self) -> list[str]:
        """Counts and lengths as lines of text."""
        cut = ", ".join(f"{self.share_cut(context):.1%} are cut at {context}" for context in CONTEXTS)
        return [
            f"{self.num_pairs} pairs, {len(self.words)} captions",
            f"words: {Lengths.of(self.words)}",
            f"tokens: {Lengths.of(self.tokens)}; {cut}",
        ]


@dataclass(slots=True)
class SetInfo:
    """A set. The counters count pairs: of pictures by hash, captions by hash, formats and modes, and sizes."""

    path: Path
    name: str
    licence: str
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    pictures: Counter[str] = field(default_factory=Counter)
    captions: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: int = 0

    def lines(self) -> list[str]:
        """The set as lines of text for a terminal."""
        lines = [f"{self.path}: {self.name}", f"licence: {self.licence}"]
        for name, split in self.splits.items():
            first, *rest = split.lines()
            lines += [f"{name}: {first}{_published(self.name, name, split.num_pairs)}", *(f"  {line}" for line in rest)]
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        widths, heights = ([size[axis] for size in self.sizes.elements()] for axis in (0, 1))
        lines.append(f"pictures: {kinds}; {self.bytes / 1e6:.1f} MB")
        lines.append(f"  width {Lengths.of(widths)}; height {Lengths.of(heights)}; {len(self.sizes)} sizes")
        return [*lines, f"duplicates: {_repeated(self.pictures, 'picture')}, {_repeated(self.captions, 'caption')}"]


def describe_set(path: Path, progress: Callable[[Progress], None] | None = None) -> SetInfo:
    """Read a whole set once and describe it. Tokens are those of CLIP's own vocabulary.

    Raises:
        ValueError: The folder is no set, or is damaged.
    """
    receipt = read_receipt(path)
    if receipt is None:
        raise ValueError(f"{path} holds no {MANIFEST}: it is no shard set, or one that was not written by shards")
    encode = _clip_encoder()
    info = SetInfo(path, receipt.content["name"], receipt.content["licence"])
    wanted = sum(entry["written"] for entry in receipt.splits.values())
    for name in receipt.splits:
        split = info.splits[name] = SplitInfo()
        reader = ShardReader(path / name)
        for index in range(len(reader)):
            pair = reader[index]
            split.num_pairs += 1
            split.words += [len(caption.split()) for caption in pair["captions"]]
            split.tokens += [len(encode(caption)) + 2 for caption in pair["captions"]]
            _count(info, pair["image"], pair["captions"])
            if progress is not None:
                progress(Progress(info.kinds.total(), wanted, info.bytes))
    return info


def _count(info: SetInfo, image: bytes, captions: list[str]) -> None:
    content = content_of("", image, captions)
    facts = image_facts(image)
    info.pictures[content.image] += 1
    info.captions.update(content.captions)
    info.kinds[f"{facts.format} {facts.mode}"] += 1
    info.sizes[facts.width, facts.height] += 1
    info.bytes += len(image)


def _clip_encoder() -> Callable[[str], list[int]]:
    from open_clip.tokenizer import SimpleTokenizer  # seconds, and torch comes along

    return SimpleTokenizer().encode


def _published(name: str, split: str, num_pairs: int) -> str:
    """How a split compares with the size that its authors state."""
    from shards.sources import SOURCES

    published = SOURCES[name].published.get(split) if name in SOURCES else None
    if published is None:
        return ""
    return ", as published" if num_pairs == published else f", of {published} published"


def _repeated(counts: Counter[str], what: str) -> str:
    extra = counts.total() - len(counts)
    return f"{extra} {what}{'' if extra == 1 else 's'} that occur{'s' if extra == 1 else ''} before"
