"""Adapters in real training: what is saved is what was trained, merged; runs go on bitwise, on the same backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import ModelConfig
from pipeline.model import build_model, load_checkpoint
from pipeline.model.adapters import load_adapter
from pipeline.runs import MODEL_CONFIG, WEIGHTS, Checkpoint, Run, read_json
from pipeline.train.checkpoint import ADAPTER, STATE
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, losses_of, train_recording, write_recipe, write_zero_config

SIGTERM_SAVED = 143
OPTIONS: dict[str, Any] = {
    "objective": {"name": "infonce"},
    "optimizer": {"lr": 0.003},
    "schedule": {"epochs": 3, "warmup_steps": 2},
}


def recipe(folder: Path, shards: Path, kind: str, **sections: Any) -> str:
    """Of the tiny model, from a file of weights; its text projection trains beside the adapters."""
    theirs = folder / "backbone"
    plain = write_recipe(folder, shards)
    name = json.loads(plain.read_text())["model"]["name"]
    if not theirs.exists():
        theirs.mkdir()
        torch.manual_seed(7)
        model = build_model(ModelConfig(name=name))
        save_file(model.encoder_state(), theirs / WEIGHTS)
        (theirs / MODEL_CONFIG).write_text(json.dumps(model.spec))
    sections = {
        "model": {"name": name, "init": str(theirs), "trainable": ["text.text_projection", "logit_scale"]},
        "adapters": {"name": kind, "r": 4, "targets": ["attention", "mlp"]},
        **OPTIONS,
        **sections,
    }
    return str(write_recipe(folder, shards, **sections))


def newest(run: Path) -> Checkpoint:
    found = Run(run).latest()
    assert found is not None
    return found


def features_live_and_saved(config: str, recipe: str, steps: int) -> tuple[torch.Tensor, ...]:
    """Features of one batch from the engine after some steps, and from the checkpoint that was saved then."""
    trainer: Any = build_on_rank(config, recipe, [])
    batches = trainer.data.epoch(0)
    trainer.engine.train()
    for step in range(steps):
        trainer.stepper.step(lambda: next(batches), step, step)
    checkpoint = trainer.save()
    trainer.engine.eval()
    batch = next(batches)
    inputs = (batch["pixel_values"], batch["input_ids"])
    model, _ = load_checkpoint(checkpoint.path)
    start = build_model(trainer.recipe.model)
    load_adapter(_initialised(start, trainer.recipe), checkpoint.path / ADAPTER)
    with torch.no_grad():
        found = [trainer.engine(*inputs), model(*inputs), start.eval()(*inputs)]
    return tuple(f for features in found for f in (features.image_features, features.text_features))


def _initialised(model: Any, recipe: Any) -> Any:
    from pipeline.model.factory import load_weights
    from pipeline.model.formats import read_weights

    load_weights(model, read_weights(recipe.model.init))
    return model


@pytest.mark.parametrize(("kind", "stage"), [("lora", 2), ("dora", 3)])
def test_the_saved_encoders_and_adapters_give_the_features_of_the_live_model(
    kind: str, stage: int, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    path = recipe(tmp_path, tiny_set, kind)
    for found in ranks(2).run(features_live_and_saved, str(write_zero_config(tmp_path, stage)), path, 3):
        live, merged, adapted = found[:2], found[2:4], found[4:]
        for number in (0, 1):
            torch.testing.assert_close(merged[number], live[number], atol=1e-5, rtol=0)
            torch.testing.assert_close(adapted[number], live[number], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "stage", "bf16"), [("lora", 2, False), ("dora", 3, True)])
def test_a_run_learns_saves_its_adapters_and_goes_on_bitwise(
    kind: str, stage: int, bf16: bool, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """With dropout in the adapters and an average, stopped in the middle of the second epoch."""
    adapters = {"name": kind, "r": 4, "dropout": 0.1, "targets": ["attention", "mlp"]}
    path = recipe(tmp_path, tiny_set, kind, adapters=adapters, ema={"decay": 0.9})
    config = str(write_zero_config(tmp_path, stage, bf16={"enabled": bf16}))
    whole = ranks(2).run(train_recording, config, path, ["run.name=whole"])
    first = ranks(2).run(train_recording, config, path, ["run.name=cut"], None, 6)
    second = ranks(2).run(train_recording, config, path, ["run.name=cut"], "auto")
    assert [code for code, _ in whole + first + second] == [0, 0, SIGTERM_SAVED, SIGTERM_SAVED, 0, 0]
    runs = tmp_path / "runs"
    losses = losses_of(runs / "whole")
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert losses_of(runs / "cut") == losses
    one, two = newest(runs / "whole").path, newest(runs / "cut").path
    for name in (WEIGHTS, STATE, f"{ADAPTER}/adapter_model.safetensors", f"{ADAPTER}/beside.safetensors"):
        expected, got = load_file(one / name), load_file(two / name)
        assert got.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == []
    _check_files(one, tmp_path / "backbone", bf16)


def _check_files(checkpoint: Path, backbone: Path, bf16: bool) -> None:
    """What the encoders keep of the backbone, and what the training state is about."""
    before, after = load_file(backbone / WEIGHTS), load_file(checkpoint / WEIGHTS)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    beside = {"text.text_projection", "logit_scale"}
    adapted = {n for n in before if n.endswith((".in_proj_weight", "out_proj.weight", "c_fc.weight", "c_proj.weight"))}
    dtype = torch.bfloat16 if bf16 else torch.float32
    moved = {n for n, t in before.items() if not torch.equal(after[n].to(dtype), t.to(dtype))}
    assert moved == adapted | beside
    steps = {key.removeprefix("step/") for key in load_file(checkpoint / STATE) if key.startswith("step/")}
    assert {name for name in steps if ".lora_" not in name} == beside
    listed = read_json(checkpoint / "manifest.json")["files"]
    assert {name for name in listed if name.startswith(f"{ADAPTER}/")} == {
        f"{ADAPTER}/{name}"
        for name in ("adapter_model.safetensors", "adapter_config.json", "beside.safetensors", "backbone.json")
    }


def test_a_run_goes_on_with_the_backbone_that_it_began_with_only(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, tiny_set, "lora")
    ranks(1).run(train_recording, "zero0", path, ["run.name=a"], None, 2)
    weights = tmp_path / "backbone" / WEIGHTS
    state = load_file(weights)
    state["visual.proj"][0, 0] += 1e-3
    save_file(state, weights)
    with pytest.raises(ValueError, match="adapters were trained on other frozen weights than the recipe's model has"):
        ranks(1).run(train_recording, "zero0", path, ["run.name=a"], "auto")


def test_options_that_have_nothing_to_act_on_are_refused_and_others_go_along(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    path = recipe(tmp_path, tiny_set, "lora")
    with pytest.raises(ValueError, match="freeze_positions is 5, but the whole table is frozen"):
        ranks(1).run(build_on_rank, "zero0", path, ["model.freeze_positions=5"])
    overrides = ["optimizer.layer_decay=0.5", "optimizer.lr_overrides={'*lora_B*': 0.04}", "model.freeze.image=1"]
    (groups,) = ranks(1).run(_rates, "zero0", path, overrides)
    last, first = "text.transformer.resblocks.1", "text.transformer.resblocks.0"
    rates = {f"{last}.mlp.c_fc.lora_A": 0.0015, f"{first}.mlp.c_fc.lora_A": 0.00075, f"{first}.mlp.c_fc.lora_B": 0.04}
    assert {name: groups[f"{name}.default.weight"] for name in rates} == pytest.approx(rates)
    assert not any(name.startswith("visual.transformer.resblocks.0") for name in groups)


def _rates(config: str, recipe: str, overrides: list[str]) -> dict[str, float]:
    """Peak learning rates by parameter name."""
    trainer: Any = build_on_rank(config, recipe, overrides)
    rates = {id(p): group["peak_lr"] for group in trainer.engine.optimizer.param_groups for p in group["params"]}
    return {name: rates[id(p)] for name, p in trainer.weights.parameters.items()}
