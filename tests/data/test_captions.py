"""What of a caption a pair gets: decided by (seed, epoch, id), from sentences that were split as a reader would."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.data.captions import CaptionSampler, split_sentences
from pipeline.sections import CaptionConfig
from shards.reader import ShardReader
from tests.data.reading import training_data

FOUR = 'A bus. It says "Go!" Is it 3.5 m high? Yes'
SENTENCES = ["A bus.", 'It says "Go!"', "Is it 3.5 m high?", "Yes"]


@pytest.mark.parametrize(
    ("caption", "sentences"),
    [
        (FOUR, SENTENCES),
        ("one sentence without a stop", ["one sentence without a stop"]),
        ("First line\nsecond line.  Third.", ["First line", "second line.", "Third."]),
        ("Really?! Yes... it is.", ["Really?!", "Yes...", "it is."]),
        ("", [""]),
        ("...", ["..."]),
    ],
)
def test_sentences(caption, sentences):
    assert split_sentences(caption) == sentences


def drawn(sample: str, count: int = 400, **config) -> Counter[str]:
    sampler = CaptionSampler(CaptionConfig(sample=sample, **config), seed=5)
    return Counter(sampler([FOUR], f"id-{number}", epoch=0) for number in range(count))


def test_whole_captions_stay_whole():
    assert drawn("whole") == {FOUR: 400}


def test_the_rest_drops_the_first_sentence_unless_it_is_the_only_one():
    assert drawn("rest") == {" ".join(SENTENCES[1:]): 400}
    assert CaptionSampler(CaptionConfig(sample="rest"), 0)(["Only one."], "a", 0) == "Only one."


def test_random_sentences_are_any_subset_in_order():
    found = drawn("sentences", 2000)
    subsets = {" ".join(s for k, s in enumerate(SENTENCES) if bits >> k & 1) for bits in range(1, 16)}
    assert set(found) == subsets


def test_sub_captions_are_runs_of_neighbours():
    found = drawn("sub", 2000)
    runs = {" ".join(SENTENCES[a:b]) for a in range(4) for b in range(a + 1, 5)}
    assert set(found) == runs
    assert 400 < found[FOUR] < 600  # each length is as likely: a quarter is whole


def test_a_share_of_the_captions_stays_whole():
    found = drawn("rest", 2000, probability=0.25)
    assert 400 < found[" ".join(SENTENCES[1:])] < 600
    assert sum(found.values()) == found[FOUR] + found[" ".join(SENTENCES[1:])]


def test_the_draw_follows_from_seed_epoch_and_id():
    config = CaptionConfig(sample="sentences")
    captions = [f"{word} one. {word} two. {word} three." for word in "abc"]

    def draws(seed: int, epoch: int) -> list[str]:
        sampler = CaptionSampler(config, seed)
        return [sampler(captions, str(number), epoch) for number in range(50)]

    assert draws(1, 2) == draws(1, 2)
    assert len({tuple(draws(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_drawn_captions_whatever_the_workers(tiny_set, workers):
    config = CaptionConfig(sample="sub")
    data = training_data(tiny_set / "train", 8, workers=workers, captions=config)
    reader = ShardReader(tiny_set / "train")
    captions = {reader[k]["id"]: reader[k]["captions"] for k in range(len(reader))}
    sampler = CaptionSampler(config, seed=7)
    for batch in data.epoch(1):
        expected = [sampler(captions[i], i, 1) for i in batch["ids"]]
        assert batch["captions"] == expected
    whole = sum(sampler(captions[i], i, 1) in captions[i] for i in captions)
    assert whole < len(captions)  # some captions have several sentences
