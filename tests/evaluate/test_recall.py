"""Retrieval metrics against a plain sort per query."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate import recall, retrieval_metrics


def sorted_rank(scores: list[float], right: set[int]) -> int:
    """The place of the best right candidate when ties are sorted against it and other right ones are left out."""
    best = max(scores[i] for i in right)
    row = [(-score, 0) for i, score in enumerate(scores) if i not in right] + [(-best, 1)]
    return sorted(row).index((-best, 1)) + 1


def naive(images, texts, owner, recall_at) -> dict[str, dict[str, float]]:
    scores = [[float(np.dot(text, image)) for image in images] for text in texts]  # exact: small integers
    t2i = [sorted_rank(row, {own}) for row, own in zip(scores, owner, strict=True)]
    i2t = []
    for image in range(len(images)):
        column = [row[image] for row in scores]
        i2t.append(sorted_rank(column, {m for m, own in enumerate(owner) if own == image}))
    return {way: summary(ranks, recall_at) for way, ranks in (("t2i", t2i), ("i2t", i2t))}


def summary(ranks: list[int], recall_at) -> dict[str, float]:
    middle = sorted(ranks)
    median = (middle[(len(ranks) - 1) // 2] + middle[len(ranks) // 2]) / 2
    recalls = {str(k): 100 * sum(rank <= k for rank in ranks) / len(ranks) for k in recall_at}
    return {**recalls, "median_rank": median}


@st.composite
def problems(draw):
    """Small integers, so that ties are frequent and products exact; one to three captions an image, in any order."""
    num_images, dim = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=num_images, max_size=num_images))
    owner = draw(st.permutations([image for image, count in enumerate(counts) for _ in range(count)]))
    values = st.integers(-2, 2)
    images = draw(st.lists(st.lists(values, min_size=dim, max_size=dim), min_size=num_images, max_size=num_images))
    texts = draw(st.lists(st.lists(values, min_size=dim, max_size=dim), min_size=len(owner), max_size=len(owner)))
    return np.asarray(images, np.float32), np.asarray(texts, np.float32), np.asarray(owner, np.int64)


@settings(max_examples=200, deadline=None)
@given(problem=problems(), chunk=st.sampled_from([1, 2, 3, 2048]))
def test_equals_a_sort_per_query_in_chunks_of_any_size(problem, chunk):
    images, texts, owner = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "_CHUNK", chunk)
        metrics = retrieval_metrics(images, texts, owner, recall_at=(1, 2, 5))
    expected = naive(images, texts, owner.tolist(), (1, 2, 5))
    assert (metrics["images"], metrics["captions"]) == (len(images), len(texts))
    for way in ("t2i", "i2t"):
        assert metrics[way] == pytest.approx(expected[way])


def test_a_hand_counted_case():
    images = np.asarray([[1, 0], [0, 1], [-1, 0]], np.float32)
    texts = np.asarray([[1, 0], [1, 0], [0, 1], [1, 0]], np.float32)  # the last one should fit image 2 and does not
    metrics = retrieval_metrics(images, texts, np.asarray([0, 0, 1, 2]), recall_at=(1, 2, 3))
    # Text to image, ranks 1, 1, 1, 3. Image 0 ties with the stray caption: rank 2. Image 1: rank 1. Image 2's own
    # caption scores -1, the three others 0, -1 and -1: all of them count, so its rank is 4.
    assert metrics["t2i"] == {"1": 75.0, "2": 75.0, "3": 100.0, "median_rank": 1.0}
    assert metrics["i2t"] == pytest.approx({"1": 100 / 3, "2": 200 / 3, "3": 200 / 3, "median_rank": 2.0})


@pytest.mark.parametrize(("num_images", "dim"), [(2, 3), (24, 384), (33, 515), (101, 384), (2500, 64)])
def test_a_collapse_scores_zero(num_images, dim):
    """All embeddings alike, with real numbers, whose products a matrix kernel could round apart at the edges."""
    point = np.random.default_rng(dim).normal(size=dim).astype(np.float32)
    collapsed = np.tile(point / np.linalg.norm(point), (num_images, 1))
    metrics = retrieval_metrics(collapsed, collapsed.copy(), np.arange(num_images), recall_at=(1,))
    assert (metrics["t2i"]["1"], metrics["i2t"]["1"]) == (0.0, 0.0)
    assert metrics["t2i"]["median_rank"] == metrics["i2t"]["median_rank"] == num_images


def test_perfect_embeddings_score_100():
    metrics = retrieval_metrics(np.eye(12, dtype=np.float32), np.eye(12, dtype=np.float32), np.arange(12))
    assert metrics["t2i"] == metrics["i2t"] == {"1": 100.0, "5": 100.0, "10": 100.0, "median_rank": 1.0}


def test_agrees_with_scikit_learn_where_there_are_no_ties():
    top_k_accuracy_score = pytest.importorskip("sklearn.metrics").top_k_accuracy_score
    random = np.random.default_rng(3)
    images, noise = random.normal(size=(2, 200, 16))
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    texts = (images + 0.3 * noise).astype(np.float32)
    metrics = retrieval_metrics(images, texts, np.arange(200))
    for k in (1, 5, 10):
        args = {"k": k, "labels": np.arange(200)}
        assert metrics["t2i"][str(k)] == pytest.approx(
            100 * top_k_accuracy_score(np.arange(200), texts @ images.T, **args)
        )
        assert metrics["i2t"][str(k)] == pytest.approx(
            100 * top_k_accuracy_score(np.arange(200), images @ texts.T, **args)
        )
    assert 0 < metrics["t2i"]["1"] < 100


def test_an_image_without_a_caption_is_refused():
    with pytest.raises(ValueError, match=r"3 images, but captions belong to 2"):
        retrieval_metrics(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), np.asarray([0, 0, 2]))
