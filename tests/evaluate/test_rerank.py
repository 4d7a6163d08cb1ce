"""Ranking again by late interaction: against a plain sort of every candidate, and from a real run's checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluate import retrieval_metrics
from pipeline.evaluate.command import evaluate_model
from pipeline.evaluate.rerank import PartsEncoder, reranked_metrics
from tests.ranks import Ranks
from tests.train.tiny import train_on_rank, write_recipe


def _parts(seed: int, n: int, count: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(n, count, 4))
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def _late(image: np.ndarray, text: np.ndarray) -> float:
    found = [[float(x @ y) for y in text.astype(float)] for x in image.astype(float)]
    bent = [[v if v > 0 else 0.1 * v for v in row] for row in found]
    of_image = sum(max(row) for row in bent) / len(bent)
    return of_image + sum(max(column) for column in zip(*bent, strict=True)) / len(bent[0])


def _ranks(images: np.ndarray, texts: np.ndarray, owner: list[int], top: int) -> tuple[list[int], list[int]]:
    """By sorting: candidates by cosine, the first `top` of them again, the right ones but the best left out."""

    def rank(pairs: list[tuple[int, int]], right: set[tuple[int, int]]) -> int:
        cosine = {p: float(images[p[0], -1].astype(float) @ texts[p[1], -1].astype(float)) for p in pairs}
        order = sorted(pairs, key=lambda p: -cosine[p])
        again = {p: 0.8 * cosine[p] + 0.2 * _late(images[p[0]], texts[p[1]]) for p in order[:top]}
        order = sorted(order[:top], key=lambda p: -again[p]) + order[top:]
        return next(k for k, p in enumerate(order) if p in right) + 1

    rows, captions = range(len(images)), range(len(texts))
    t2i = [rank([(i, j) for i in rows], {(owner[j], j)}) for j in captions]
    i2t = [rank([(i, j) for j in captions], {(i, j) for j in captions if owner[j] == i}) for i in rows]
    return t2i, i2t


@pytest.mark.parametrize("top", [1, 3, 20, 1000])
def test_the_best_candidates_are_sorted_again(top: int) -> None:
    images, texts, owner = _parts(0, 20, 3), _parts(1, 26, 2), [*range(20), *range(6)]
    found = reranked_metrics(images, texts, np.array(owner), top)
    for ranks, direction in zip(_ranks(images, texts, owner, top), ("t2i", "i2t"), strict=True):
        expected = {str(k): 100 * sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 5, 10)}
        assert found[direction] == pytest.approx({**expected, "median_rank": float(np.median(ranks))})
    if top == 1:
        plain = retrieval_metrics(images[:, -1], texts[:, -1], np.array(owner))
        assert (found["t2i"], found["i2t"]) == (plain["t2i"], plain["i2t"])


def test_parts_that_collapse_to_a_point_score_zero() -> None:
    images, texts = np.repeat(_parts(0, 1, 3), 9, 0), np.repeat(_parts(1, 1, 2), 9, 0)
    found = reranked_metrics(images, texts, np.arange(9), 5)
    assert found["t2i"]["5"] == found["i2t"]["5"] == 0


def test_a_run_is_reported_both_ways(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, ema in (("finelip", 0.5), ("plain", None)):
        recipe = write_recipe(tmp_path, tiny_set, framework={"name": name}, schedule={"epochs": 1}, ema={"decay": ema})
        ranks(1).run(train_on_rank, "zero2", str(recipe), [f"run.name={name}"])
    alone = evaluate_model("finelip", str(tiny_set), "test", 8, runs, lambda _: None)
    both = evaluate_model("finelip", str(tiny_set), "test", 8, runs, lambda _: None, rerank=4)
    for direction in ("t2i", "i2t"):
        assert both[direction] == alone[direction]
        again, plain = both["reranked"][direction], both[direction]
        assert again["5"] == plain["5"], "beyond the best four nothing changes"
        assert math.isfinite(again["median_rank"])
    assert both["reranked"]["top"] == 4
    assert len(both["lines"]) == len(alone["lines"]) + 3
    assert "the best 4 again" in both["lines"][-3]
    with pytest.raises(ValueError, match="of the framework 'plain'"):
        evaluate_model("plain", str(tiny_set), "test", 8, runs, lambda _: None, rerank=4)
    with pytest.raises(ValueError, match="name a run of the framework finelip"):
        PartsEncoder(object(), tmp_path)  # type: ignore[arg-type]
