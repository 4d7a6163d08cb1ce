from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export.parity import compare
from export.ranks import compare_ranks
from export.reference import write_reference
from export.runtime import Bundle
from pipeline.model import DualEncoder

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle(tiny_bundle)


@pytest.fixture(scope="module")
def saved(tiny: DualEncoder, tiny_pairs: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    path = tmp_path_factory.mktemp("reference") / "reference.npz"
    write_reference(tiny, tiny_pairs, path)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.fixture
def reference(saved: Arrays) -> Arrays:
    """torch's side, to be changed by a test."""
    return {name: array.copy() for name, array in saved.items()}


def test_a_good_bundle_passes(bundle: Bundle, reference: Arrays) -> None:
    report = compare(bundle, reference)
    assert report["failures"] == []
    assert report["pairs"] == 10
    assert report["provider"] == "CPUExecutionProvider"


def test_every_stage_can_fail(bundle: Bundle, reference: Arrays) -> None:
    reference["input_ids"][3, 1] += 1
    reference["pixel_values"][2, 0, 5, 5] += 0.004
    reference["image_7"][6, 0] += 2e-4
    reference["text_all"] = reference["text_all"][::-1]
    failures = compare(bundle, reference)["failures"]
    assert failures[:3] == [
        "the token ids differ",
        "the pixels differ by up to 4.0e-03",
        "image embeddings at batch 7 differ by up to 2.0e-04 (limit 1e-04)",
    ]
    assert failures[3].startswith("text embeddings over all pairs differ by up to")


def test_values_that_are_not_finite_fail(bundle: Bundle, reference: Arrays) -> None:
    reference["text_2"][0, 0] = np.nan
    assert compare(bundle, reference)["failures"] == [
        "text embeddings at batch 2 differ by up to inf (limit 1e-04)"
    ] + [failure for failure in compare(bundle, reference)["failures"] if "batch 2" not in failure]


def _unit(rows: list[list[float]]) -> NDArray[np.float32]:
    array = np.array(rows, np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def test_ranks_that_swap_within_the_tie_agree() -> None:
    text = _unit([[1, 0], [0, 1]])
    image = _unit([[1, 1], [1, 1.000001]])
    swapped = image[::-1].copy()
    ranks = compare_ranks((image, text), (swapped, text), tie=1e-5)
    assert ranks["t2i"] == {"queries": 2, "equal": 0, "tied": 2, "different": 0}
    ranks = compare_ranks((image, text), (swapped, text), tie=1e-8)
    assert ranks["t2i"] == {"queries": 2, "equal": 0, "tied": 0, "different": 2}


def test_equal_embeddings_rank_equally() -> None:
    generator = np.random.default_rng(0)
    sides = _unit(generator.normal(size=(30, 8)).tolist()), _unit(generator.normal(size=(30, 8)).tolist())
    assert compare_ranks(sides, sides, tie=0.0) == {
        direction: {"queries": 30, "equal": 30, "tied": 0, "different": 0} for direction in ("t2i", "i2t")
    }
