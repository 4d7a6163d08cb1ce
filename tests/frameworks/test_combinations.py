"""Every framework with and without the margin: it trains on real shards, goes on, and leaves the encoders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.onnx import TEXT, VISION, export_tower
from pipeline.frameworks import FRAMEWORKS
from pipeline.metrics import is_evaluation, read_metrics
from pipeline.model import load_checkpoint
from pipeline.runs import WEIGHTS, Run, sha256_of
from pipeline.train.checkpoint import STATE
from tests.fixtures import write_tiny_set
from tests.ranks import Ranks
from tests.train.tiny import losses_of, train_on_rank, write_recipe

WORDS = [*FRAMEWORKS, "lora", "dora"]
OBJECTIVES = ["infonce", "hn"]


# The paper puts GOAL on a CLIP that has met captions; from random weights its alignment terms, at the paper's weight of
# 1, are met at once by features that are all the same, and then nothing is left to learn.
FROM_RANDOM_WEIGHTS = {"goal": {"patch_weight": 0.05, "text_weight": 0.05}}


def _sections(
    word: str, objective: str, schedule: dict[str, Any], options: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    kind = "adapters" if word in ("lora", "dora") else "framework"
    chosen = {kind: {"name": word, **(options or {})}}
    return {**chosen, "objective": {"name": objective}, "schedule": schedule}


def _architecture(checkpoint: Path) -> list[list[Any]]:
    """Of both graphs: every operator with its attributes, inputs and outputs, and name, type and shape of weights."""
    model, _ = load_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights that are still equal, as biases that adapters leave at zero, are stored once
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    found = []
    for tower in (VISION, TEXT):
        graph = export_tower(model, tower).graph
        nodes = [node.SerializeToString(deterministic=True) for node in graph.node]
        found.append([nodes, [(w.name, w.data_type, tuple(w.dims)) for w in graph.initializer]])
    return found


def _hashes(checkpoint: Path) -> list[str]:
    return [sha256_of(checkpoint / name) for name in (WEIGHTS, STATE)]


@pytest.fixture(scope="module")
def backbone(ranks: Ranks, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The graphs of a run of plain fine-tuning."""
    folder = tmp_path_factory.mktemp("plain")
    ranks(2).run(train_on_rank, "zero2", str(write_recipe(folder, tiny_set, schedule={"epochs": 1})), ["run.name=a"])
    newest = Run(folder / "runs" / "a").latest()
    assert newest is not None
    return _architecture(newest.path)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("word", WORDS)
def test_every_pair_of_words_trains_goes_on_and_exports(
    word: str, objective: str, ranks: Ranks, tiny_set: Path, tmp_path: Path, backbone: list[list[Any]]
) -> None:
    recipe = write_recipe(
        tmp_path, tiny_set, **_sections(word, objective, {"epochs": 1}), checkpoint={"every_steps": 2}
    )
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole"])
    run = Run(tmp_path / "runs" / "whole")
    losses = losses_of(run.path)
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    if objective == "infonce":
        return
    middle, last = run.checkpoints()[0], run.latest()
    assert last is not None
    assert _architecture(last.path) == backbone, "nothing of the framework is in the exported graphs"
    before = _hashes(last.path)
    ranks(2).run(train_on_rank, "zero2", str(recipe), [], str(middle.path))
    again = run.latest()
    assert again is not None
    assert again.path != last.path
    assert losses_of(run.path) == losses
    assert _hashes(again.path) == before, "bitwise as if it had not stopped"


@pytest.fixture(scope="module")
def larger_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 pairs to train on, and 320 others."""
    return write_tiny_set(tmp_path_factory.mktemp("larger"), {"train": 800, "val": 320})


@pytest.mark.long
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("word", ["plain", *WORDS])
def test_every_pair_of_words_learns(word: str, objective: str, ranks: Ranks, larger_set: Path, tmp_path: Path) -> None:
    """From random weights, six epochs: the loss falls, and pictures that were not seen find their captions."""
    schedule = {"epochs": 6, "warmup_steps": 5}
    recipe = write_recipe(
        tmp_path,
        larger_set,
        **_sections(word, objective, schedule, FROM_RANDOM_WEIGHTS.get(word, {})),
        batch={"size": 64},
        optimizer={"lr": 1e-2 if word in ("lora", "dora") else 1e-3},
        evaluate={"batch_size": 64, "every_epochs": 3},
    )
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"], timeout=1800)
    run = tmp_path / "runs" / "a"
    losses = losses_of(run)
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    reached = [line["val"] for line in read_metrics(run) if is_evaluation(line)][-1]
    chance = 100 / 320
    figures = (reached["t2i"]["1"] + reached["i2t"]["1"]) / 2, (reached["t2i"]["10"] + reached["i2t"]["10"]) / 2
    assert figures[0] > 2 * chance, figures
    assert figures[1] > 2 * 10 * chance, figures
    print(f"{word} {objective}: R@1 {figures[0]:.2f}, R@10 {figures[1]:.2f}; by chance {chance:.2f}, {10 * chance:.2f}")
