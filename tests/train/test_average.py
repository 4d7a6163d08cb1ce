"""The average of the weights: what the formula says, what is evaluated and exported, what goes on training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.evaluate.command import evaluate_model
from pipeline.model import load_checkpoint
from pipeline.runs import WEIGHTS, Run
from pipeline.train.checkpoint import STATE
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, losses_of, train_on_rank, write_recipe

DECAY = 0.8


def _by_hand(config: str, recipe: str, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The average after some steps, and the same in fp64 from the weights that were read after each, on rank 0."""
    trainer = build_on_rank(config, recipe, [])
    expected = {name: tensor.double() for name, tensor in trainer.weights.read()["weight"].items()}
    batches = trainer.data.epoch(0)
    for _ in range(steps):
        trainer._optimizer_step(batches)
        for name, tensor in trainer.weights.read()["weight"].items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * tensor.double()
    return trainer.weights.read()["ema"], expected


@pytest.mark.parametrize("stage", [0, 3])
def test_it_is_what_the_formula_says(stage: int, ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, ema={"decay": DECAY})
    (found, expected), _ = ranks(2).run(_by_hand, f"zero{stage}", str(recipe), 4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_evaluation_and_export_take_the_average_and_training_the_raw_weights(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set))
    ranks(2).run(train_on_rank, "zero2", recipe, ["run.name=plain"])
    ranks(2).run(train_on_rank, "zero2", recipe, ["run.name=averaged", f"ema.decay={DECAY}"])
    plain, averaged = (Run(tmp_path / "runs" / name) for name in ("plain", "averaged"))
    assert losses_of(plain.path) == losses_of(averaged.path)
    newest, other = averaged.latest(), plain.latest()
    assert newest is not None
    assert other is not None
    raw, mean, state = load_file(other.path / WEIGHTS), load_file(newest.path / WEIGHTS), load_file(newest.path / STATE)
    for name in (key.removeprefix("weight/") for key in state if key.startswith("weight/")):
        assert torch.equal(state[f"weight/{name}"].reshape(-1), raw[name].reshape(-1)), name
    assert not torch.equal(mean["text.token_embedding.weight"], raw["text.token_embedding.weight"])
    model, _ = load_checkpoint(newest.path)
    for name, tensor in model.clip.state_dict().items():
        assert torch.equal(tensor.reshape(-1), mean[name].reshape(-1)), name
    table = max((averaged.path / "evaluations").iterdir())
    again = evaluate_model(str(newest.path), str(tiny_set), "val", 8, tmp_path / "runs", lambda _: None)
    logged = json.loads(table.read_text())
    for direction in ("t2i", "i2t"):
        assert again[direction]["5"] == pytest.approx(logged[direction]["5"], abs=5)  # 24 pairs: one is 4.2
