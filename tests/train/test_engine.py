"""The DeepSpeed config and what the engine makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.train.engine import load_deepspeed_config, micro_batch_size
from pipeline.training_sections import BatchConfig
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, write_recipe, write_zero_config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shipped_configs_say_their_stage_precision_and_clipping(stage: int) -> None:
    config = load_deepspeed_config(f"zero{stage}.json")
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == 1.0
    assert {"bf16", "fp16"} <= config.keys()


@pytest.mark.parametrize(
    ("key", "value", "recipe_key"),
    [
        ("train_batch_size", 8, "batch.size"),
        ("optimizer", {"type": "AdamW"}, "optimizer"),
        ("gradient_accumulation_steps", 2, "batch.accumulate"),
        ("scheduler", {}, "schedule"),
    ],
)
def test_a_value_stated_in_both_is_an_error(key: str, value: object, recipe_key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"states '{key}', which the recipe owns.*set {recipe_key}"):
        load_deepspeed_config(str(write_zero_config(tmp_path, 2, **{key: value})))


def test_clipping_must_be_stated(tmp_path: Path) -> None:
    """DeepSpeed's default went from 0 to 1 between releases."""
    path = tmp_path / "silent.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(ValueError, match="does not state 'gradient_clipping'"):
        load_deepspeed_config(str(path))


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not JSON"):
        load_deepspeed_config(str(path))


@pytest.mark.parametrize(("size", "world", "accumulate", "expected"), [(128, 2, 1, 64), (128, 4, 2, 16), (3, 1, 1, 3)])
def test_micro_batch(size: int, world: int, accumulate: int, expected: int) -> None:
    assert micro_batch_size(BatchConfig(size=size, accumulate=accumulate), world) == expected


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    with pytest.raises(
        ValueError, match=r"100 does not divide into 3 ranks x 2 micro-batches.*nearest that does is 102"
    ):
        micro_batch_size(BatchConfig(size=100, accumulate=2), 3)


def _clipping_in_force(config: str, recipe: str) -> tuple[float, float, float]:
    """DeepSpeed's setting, the gradient norm of one step, and the norm that reached AdamW (its first moment x 10)."""
    trainer = build_on_rank(config, recipe, [])
    trainer.stepper.micro_batch(next(trainer.data.epoch(0)), 0, 0)
    partitions = trainer.engine.optimizer.optimizer.state.values()  # ZeRO-2: each rank has its share of the moments
    squares = sum(p["exp_avg"].double().square().sum() for p in partitions)
    dist.all_reduce(squares)
    reached = math.sqrt(float(squares)) / (1 - 0.9)
    return float(trainer.engine.gradient_clipping()), float(trainer.engine.get_global_grad_norm()), reached


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_effective_clipping_is_the_stated_one(clipping: float, ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    config = write_zero_config(tmp_path, 2, gradient_clipping=clipping)
    for stated, norm, reached in ranks(2).run(_clipping_in_force, str(config), str(recipe)):
        assert stated == clipping
        assert norm > 0.5
        assert reached == pytest.approx(clipping or norm, rel=1e-3)


def _scales_after_steps(config: str, recipe: str, steps: int) -> tuple[list[int], list[float], list[float]]:
    """Shape of the temperature, s as the loss saw it, and ln s as the optimizer holds it, step by step."""
    from deepspeed.utils import safe_get_full_fp32_param

    trainer = build_on_rank(config, recipe, [])
    parameter = trainer.engine.module.clip.logit_scale
    seen, held = [], []
    batches = trainer.data.epoch(0)
    for _ in range(steps):
        for group in trainer.engine.optimizer.param_groups:
            group["lr"] = 0.1  # AdamW moves the temperature by about this much, upwards
        batch = next(batches)
        batch["input_ids"][:] = batch["input_ids"][:1]
        _push_the_temperature_up(trainer)
        trainer.stepper.micro_batch(batch, 0, 0)
        seen.append(float(trainer.stepper.logit_scale))
        held.append(float(safe_get_full_fp32_param(parameter)))
    return list(parameter.shape), seen, held


def _push_the_temperature_up(trainer: object) -> None:
    """A loss whose descent direction raises the temperature at every step."""

    def objective(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (image.sum() + text.sum()) * 0 - scale.sum() / 100

    trainer.stepper.terms.objective = objective  # type: ignore[attr-defined]


def test_the_temperature_stays_bounded_in_bf16_under_zero_2(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """An in-place clamp after the step is undone by the fp32 master; ours is in the forward pass (5 steps and more)."""
    recipe = write_recipe(tmp_path, tiny_set)
    model = json.loads((tmp_path / "tiny-clip.json").read_text())
    model["model_cfg"]["init_logit_scale"] = math.log(95.0)
    (tmp_path / "tiny-clip.json").write_text(json.dumps(model))
    config = write_zero_config(tmp_path, 2, bf16={"enabled": True})
    for shape, seen, held in ranks(2).run(_scales_after_steps, str(config), str(recipe), 4):
        assert shape == [1]
        assert seen[0] == pytest.approx(95.0, rel=0.02)  # bf16 holds ln s to 1/32
        assert all(s <= 100.0 + 1e-3 for s in seen)
        assert seen[-1] == pytest.approx(100.0, abs=1e-3)
        # The master stops near the bound, rather than climbing by the learning rate at every step.
        assert max(held) < math.log(100.0) + 0.35
