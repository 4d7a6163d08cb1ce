"""Trainings with GOAL, on shards with regions and without, on any ranks and ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.runs import Run
from tests.frameworks.shared import write_regions_set
from tests.ranks import Ranks
from tests.train.tiny import losses_of, steps_of, train_on_rank, write_recipe


def _write_regions(folder: Path, tiny_set: Path, without: int) -> Path:
    """GOAL's training list over pictures of the tiny set; the first of every so many pairs has no segment."""
    folder.mkdir()

    def describe(number: int, own: str) -> tuple[str, list[dict[str, Any]]]:
        caption = f"{own} It is number {number} of them."
        box = {"x1": 10 + number, "y1": 5, "x2": 60 + number, "y2": 80, "width": 50, "height": 75}
        segment = {"filename": "crop.png", "caption": caption.split(".")[0], "similarity_score": 20.0}
        return caption, [] if without and number % without == 0 else [{**segment, "bbox_coordinates": box}]

    return write_regions_set("goal-json", folder, tiny_set, describe)


def _recipe(folder: Path, shards: Path) -> str:
    """One epoch of four steps."""
    sections: dict[str, dict[str, Any]] = {
        "framework": {"name": "goal"},
        "data": {"val_split": None},
        "batch": {"size": 8},
        "schedule": {"epochs": 1},
        "token": {"weight": 0.5},
    }
    return str(write_recipe(folder, shards, **sections))


def test_regions_train_alike_on_any_number_of_ranks(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, _write_regions(tmp_path / "regions", tiny_set, without=0))
    for world in (1, 2):
        assert ranks(world).run(train_on_rank, "zero2", recipe, [f"run.name=on-{world}"]) == [0] * world
    one, two = (steps_of(tmp_path / "runs" / f"on-{world}") for world in (1, 2))
    assert len(one) == 4
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], abs=1e-4)
    for step in two:
        own = 0.5 * step["segment"] + step["patch"] + step["text"]
        assert step["loss"] == pytest.approx(step["objective"] + 0.5 * step["token"] + own, rel=1e-5)


def test_ranks_may_differ_in_what_they_propose_at_every_stage(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """A collective that one rank calls and another does not would end the run; later steps may choose other boxes."""
    recipe = _recipe(tmp_path, _write_regions(tmp_path / "regions", tiny_set, without=4))
    for stage in (2, 3):
        assert ranks(2).run(train_on_rank, f"zero{stage}", recipe, [f"run.name=zero{stage}"]) == [0, 0]
    (two, *_), (three, *_) = (losses_of(tmp_path / "runs" / f"zero{stage}") for stage in (2, 3))
    assert three == pytest.approx(two, rel=1e-5)


def test_a_run_with_proposed_boxes_goes_on_bitwise(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, framework={"name": "goal"}, schedule={"epochs": 2})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole", "checkpoint.keep=9"])
    run = Run(tmp_path / "runs" / "whole")
    steps = steps_of(run.path)
    assert steps[-1]["patch"] < steps[0]["patch"]
    middle, last = run.checkpoints()
    assert middle.step == 4
    ranks(2).run(train_on_rank, "zero2", str(recipe), [], str(middle.path))
    assert run.checkpoints()[-1] != last
    assert steps_of(run.path)[-1]["segment"] == steps[-1]["segment"]
    assert losses_of(run.path) == [step["loss"] for step in steps]


def test_augmentation_is_refused_where_boxes_are_of_the_shards(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, framework={"name": "goal"}, schedule={"epochs": 1})
    flip = ["run.name=flip", "data.augment.flip=0.5"]
    with pytest.raises(ValueError, match=r"data\.augment moves what the boxes .* framework\.boxes: proposed"):
        ranks(1).run(train_on_rank, "zero2", str(recipe), flip)
    assert ranks(1).run(train_on_rank, "zero2", str(recipe), [*flip, "framework.boxes=proposed"]) == [0]
