"""A set of ids in few bytes answers like Python's own."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from shards import ids as ids_module
from shards.ids import Ids


@pytest.mark.parametrize("full", [1, 3, 128])
def test_it_answers_like_a_set(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "_FULL", full)
    draw = random.Random(full)
    ours, known = Ids(), set[str]()
    for _ in range(20_000):
        id = f"{draw.randrange(9_000)}"
        assert (id in ours) == (id in known)
        assert ours.add(id) == (id not in known)
        known.add(id)
        assert len(ours) == len(known)
    assert all(id in ours for id in known)


def test_ids_are_told_apart_whatever_their_text() -> None:
    texts = ["", " ", "a", "A", "\u00e9", "e\u0301", "\ud800", "a\x00", "x" * 100_000, "x" * 100_001]
    ours = Ids()
    assert [ours.add(text) for text in texts * 2] == [True] * len(texts) + [False] * len(texts)


def test_the_end_of_one_digest_and_the_beginning_of_the_next_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {"one": b"\x00" * 8 + b"\x01" * 8, "two": b"\x02" * 8 + b"\x03" * 8, "both": b"\x01" * 8 + b"\x02" * 8}
    monkeypatch.setattr(ids_module, "_digest", digests.__getitem__)
    ours = Ids()
    assert ours.add("one")
    assert ours.add("two")
    assert "both" not in ours
    assert ours.add("both")
    assert "both" in ours


def test_an_id_takes_few_bytes() -> None:
    count = 12_000
    tracemalloc.start()
    try:
        ours = Ids()
        for number in range(count):
            ours.add(f"a folder with a long name/and another/{number:012}.jpg")
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 16 < size / count < 20
