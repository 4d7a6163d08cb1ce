"""The main job by its commands, from an installed wheel in an empty folder: train, evaluate, export, index, search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.train.tiny import write_recipe
from tests.wheel import Installed


@pytest.fixture(scope="module")
def trained(installed: Installed, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/tiny in the empty folder, trained by `pipeline train`."""
    recipe = write_recipe(tmp_path_factory.mktemp("recipe"), tiny_set, schedule={"epochs": 1}, run={"root": "runs"})
    out = _pipeline(installed, "train", "--recipe", str(recipe))
    assert "next: pipeline evaluate runs/tiny" in out
    return installed.empty / "runs" / "tiny"


@pytest.fixture(scope="module")
def bundle(installed: Installed, trained: Path) -> Path:
    """The newest run, exported without a further word."""
    out = _pipeline(installed, "export", "--onnx")
    assert re.search(r"equal to torch on 24 pairs at every batch size: .* same top-10 ranks", out)
    return trained / "bundle"


def _pipeline(installed: Installed, *words: str) -> str:
    return installed.python("-m", "pipeline.cli", *words)


def test_the_bundle_scores_what_the_checkpoint_scores(
    installed: Installed, bundle: Path, trained: Path, tiny_set: Path, tmp_path: Path
) -> None:
    scores = []
    for number, model in enumerate((trained, bundle)):
        file = tmp_path / f"{number}.json"
        out = _pipeline(installed, "evaluate", str(model), str(tiny_set), "--split", "val", "--json", str(file))
        scores.append(json.loads(file.read_text()))
        assert f"text to image: R@1 {scores[-1]['t2i']['1']:6.2f}" in out
    assert [score["negatives"] for score in scores] == [15, None]  # a bundle does not say how it was trained
    assert scores[0]["images"] == 24
    assert scores[0]["captions"] == 32  # every third pair has two
    assert scores[0]["t2i"] == scores[1]["t2i"]
    assert scores[0]["i2t"] == scores[1]["i2t"]
    # The run evaluated the same split after its last epoch.
    (table,) = (trained / "evaluations").glob("val-*.json")
    assert json.loads(table.read_text())["t2i"] == scores[0]["t2i"]


def test_evaluating_on_what_was_trained_on_says_so(installed: Installed, trained: Path, tiny_set: Path) -> None:
    out = _pipeline(installed, "evaluate", str(trained), str(tiny_set), "--split", "train")
    assert "64 of 64 pairs of" in out
    assert "were trained on: its figures are too good" in out


def test_the_manifest_says_where_the_bundle_comes_from(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["parity"]["image_max_abs_diff"] < 1e-4
    assert manifest["parity"]["text_max_abs_diff"] < 1e-4


def test_a_query_is_answered_with_a_sheet(installed: Installed, bundle: Path, tiny_set: Path, tmp_path: Path) -> None:
    index, sheet = tmp_path / "index", tmp_path / "sheet.html"
    assert "24 pictures" in _pipeline(installed, "index", str(bundle), str(tiny_set), "--out", str(index))
    out = _pipeline(installed, "search", str(index), "a flag with a star", "--top", "3", "--html", str(sheet))
    hits = [line.split() for line in out.splitlines() if re.match(r"\s+\d  ", line)]
    assert [hit[0] for hit in hits] == ["1", "2", "3"]
    scores = [float(hit[1]) for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert sheet.read_text().count("data:image/jpeg;base64,") == 3
