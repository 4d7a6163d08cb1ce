"""Training batches: every pair once, in an order that any number of ranks and workers shares, resumable anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from streaming import MDSWriter

from pipeline.data import sample_key
from shards.mds import COLUMNS
from shards.reader import ShardReader
from tests.data.reading import PREPROCESS, Utf8, interleave, pairs_of, read_epoch, read_on_rank, training_data

NUM_ODD = 23


def flat(batches):
    return [pair for batch in batches for pair in batch]


def ids(batches):
    return [sample_id for sample_id, _ in flat(batches)]


def write_split(folder: Path, samples) -> Path:
    with MDSWriter(out=str(folder), columns=COLUMNS) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def train(tiny_set) -> Path:
    return tiny_set / "train"


@pytest.fixture(scope="module")
def captions(train) -> dict[str, list[str]]:
    reader = ShardReader(train)
    return {reader[i]["id"]: reader[i]["captions"] for i in range(len(reader))}


@pytest.fixture(scope="module")
def odd_split(tiny_set, tmp_path_factory) -> Path:
    """A prime number of pairs, which no batch and no number of ranks divides."""
    reader = ShardReader(tiny_set / "val")
    return write_split(tmp_path_factory.mktemp("odd") / "split", [reader[i] for i in range(NUM_ODD)])


@pytest.fixture(scope="module")
def epochs(train) -> list[list[list[tuple[str, str]]]]:
    """Three epochs in batches of eight, read in a row by one process without workers."""
    data = training_data(train, batch_size=8)
    return [read_epoch(data, epoch) for epoch in range(3)]


# one batch ------------------------------------------------------------------------------------------------------------


def test_streaming_counts_samples_by_the_first_value_which_is_the_key(train):
    data = training_data(train, batch_size=5)
    for batch in data.epoch(0):
        assert next(iter(batch.values())) is batch["key"]
        assert batch["key"].dtype == torch.int64
        assert batch["key"].tolist() == [sample_key(i) for i in batch["ids"]]
        assert data.loader._get_batch_size(batch) == len(batch["ids"]) == 5


def test_a_batch_holds_the_pixels_and_a_caption_of_its_ids(train):
    reader = ShardReader(train)
    by_id = {reader[i]["id"]: reader[i] for i in range(len(reader))}
    batch = next(training_data(train, batch_size=6).epoch(0))
    assert batch["pixel_values"].shape == (6, 3, 8, 8)
    for row, (sample_id, caption) in enumerate(pairs_of(batch)):
        expected = torch.from_numpy(PREPROCESS.from_bytes(by_id[sample_id]["image"]))
        assert torch.equal(batch["pixel_values"][row], expected)
        assert caption in by_id[sample_id]["captions"]


def test_sample_keys_are_half_of_b2sums_64_bits():
    # printf DCI-00042 | b2sum -l 64, as an integer, without its last bit
    assert sample_key("DCI-00042") == 0x7751792CD8D88BBB >> 1
    assert sample_key("café/1F385-1F3FB") == 0xAF65A81FF61AFA1D >> 1
    assert sample_key("") == 0xE4A6A0577479B2B4 >> 1
    keys = [sample_key(str(number)) for number in range(1000)]
    assert len(set(keys)) == 1000
    assert 0 <= min(keys) <= max(keys) < 2**63


# one epoch ------------------------------------------------------------------------------------------------------------


def test_every_pair_once_per_epoch(epochs, captions):
    for batches in epochs:
        assert [len(batch) for batch in batches] == [8] * 8
        assert sorted(ids(batches)) == sorted(captions)


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 0), (5, 2), (63, 0), (63, 2), (64, 0), (64, 2)])
def test_only_the_last_partial_batch_is_dropped(train, captions, batch_size, workers):
    data = training_data(train, batch_size, workers=workers)
    seen = ids(read_epoch(data))
    assert len(data) == len(captions) // batch_size
    assert len(seen) == len(set(seen)) == len(data) * batch_size
    assert set(seen) <= set(captions)


def test_the_dropped_pairs_are_others_in_another_epoch(train, captions):
    data = training_data(train, batch_size=24)
    dropped = [set(captions) - set(ids(read_epoch(data, epoch))) for epoch in range(3)]
    assert [len(d) for d in dropped] == [16] * 3
    assert len(set(map(frozenset, dropped))) == 3


def test_the_order_follows_from_seed_and_epoch(train, epochs):
    again = training_data(train, batch_size=8)
    assert read_epoch(again, 2) == epochs[2]
    assert read_epoch(again, 0) == epochs[0]
    del again
    assert len({tuple(ids(batches)) for batches in epochs}) == 3
    other_seed = training_data(train, batch_size=8, seed=8)
    assert ids(read_epoch(other_seed, 0)) != ids(epochs[0])


def test_the_caption_is_drawn_by_seed_epoch_and_id(train, captions, epochs):
    drawn: dict[str, list[str]] = {}
    for sample_id, caption in flat(flat(epochs)):
        drawn.setdefault(sample_id, []).append(caption)
    assert all(set(drawn[i]) <= set(captions[i]) for i in captions)
    several = [i for i in captions if len(captions[i]) == 2]
    assert len(several) > 15
    # Each epoch draws anew: that all of them draw alike three times has probability 4^-len(several).
    assert any(len(set(drawn[i])) == 2 for i in several)
    first = {caption == captions[i][0] for i in several for caption in drawn[i]}
    assert first == {True, False}


# ranks and workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(train, epochs, workers):
    assert read_epoch(training_data(train, batch_size=8, workers=workers), 1) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_the_global_batches_of_one(ranks, train, epochs, workers):
    answers = ranks(2).run(read_on_rank, train, 4, workers, [(0, 0), (1, 0)])
    assert [length for length, _ in answers] == [8, 8]
    for epoch in (0, 1):
        assert interleave([batches[epoch] for _, batches in answers]) == epochs[epoch]


def test_ranks_stay_even_where_nothing_divides(ranks, odd_split):
    """23 pairs in global batches of 6: 3 batches on one rank or two, of the same pairs, none of them twice."""
    alone = training_data(odd_split, batch_size=6)
    expected = read_epoch(alone)
    assert len(alone) == len(expected) == 3
    del alone
    answers = ranks(2).run(read_on_rank, odd_split, 3, 0, [(0, 0)])
    assert [(length, len(batches[0])) for length, batches in answers] == [(3, 3), (3, 3)]
    assert interleave([batches[0] for _, batches in answers]) == expected
    assert len(set(ids(expected))) == 18


@pytest.mark.parametrize(("batch_size", "batches"), [(1, 11), (2, 5), (4, 2), (11, 1)])
def test_the_promised_length_is_what_every_rank_gets(ranks, odd_split, batch_size, batches):
    answers = ranks(2).run(read_on_rank, odd_split, batch_size, 0, [(0, 0), (0, 1)])
    for length, (whole, rest) in answers:
        assert len(whole) == length == batches
        assert rest == whole[1:]
    seen = ids(interleave([whole for _, (whole, _) in answers]))
    assert len(seen) == len(set(seen)) == batches * batch_size * 2


# resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4, 7, 8])
def test_going_on_after_some_batches_gives_exactly_the_rest(train, epochs, done, workers):
    data = training_data(train, batch_size=8, workers=workers)
    assert read_epoch(data, 1, batches_done=done) == epochs[1][done:]
    if done == 8:  # exactly the end of an epoch: the next one starts at its beginning
        assert read_epoch(data, 2) == epochs[2]


def test_going_on_after_an_interrupted_epoch_in_the_same_process(train, epochs):
    data = training_data(train, batch_size=8)
    begun = data.epoch(0)
    assert [pairs_of(next(begun)) for _ in range(3)] == epochs[0][:3]
    begun.close()
    assert read_epoch(data, 0, batches_done=3) == epochs[0][3:]
    assert read_epoch(data, 1) == epochs[1]


def test_the_dropped_tail_stays_dropped_after_going_on(odd_split):
    data = training_data(odd_split, batch_size=5)
    whole = read_epoch(data, 0)
    assert len(whole) == 4
    for done in range(5):
        assert read_epoch(data, 0, batches_done=done) == whole[done:]


@pytest.mark.parametrize("done", [1, 7, 8])
def test_two_ranks_go_on_with_the_global_batches_of_one(ranks, train, epochs, done):
    answers = ranks(2).run(read_on_rank, train, 4, 0, [(1, done), (2, 0)])
    rest, following = ([batches[k] for _, batches in answers] for k in (0, 1))
    assert interleave(rest) == epochs[1][done:]
    assert interleave(following) == epochs[2]


# what is wrong --------------------------------------------------------------------------------------------------------


def test_a_split_smaller_than_a_global_batch_is_refused(odd_split):
    with pytest.raises(ValueError, match=r"has 23 pairs, fewer than one batch of 24: lower batch\.size"):
        training_data(odd_split, batch_size=12, world_size=2)


def test_a_split_of_broken_pictures_alone_is_named_with_what_to_do(tiny_set, tmp_path):
    sample = ShardReader(tiny_set / "val")[0]
    broken = [{**sample, "id": "broken-one", "image": sample["image"][:200]}] * 2
    data = training_data(write_split(tmp_path / "split", broken), batch_size=2)
    with pytest.raises(ValueError, match=r"no sample of .*split can be read; run `pipeline shards verify`"):
        read_epoch(data)


ABANDONED = """
from pathlib import Path
from tests.data.reading import training_data
batches = training_data(Path({split!r}), batch_size=2, workers=1).epoch(0)
next(batches)
raise SystemExit(7)
"""


def test_a_rank_that_fails_in_the_middle_of_an_epoch_ends_with_its_workers(train):
    """Workers ignore SIGTERM, by which Python ends them at exit: without more, the rank would wait for ever."""
    code = ABANDONED.format(split=str(train))
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 7


def test_the_test_tokenizer_can_be_read_back():
    batch = {"input_ids": Utf8()(["é!", "longer"]), "ids": ["a", "b"]}
    assert pairs_of(batch) == [("a", "é!"), ("b", "longer")]
