"""The options of a recipe's model and captions, trained by the real engine on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.runs import Run
from tests.model import official
from tests.train.tiny import build_on_rank, train_on_rank, write_recipe, write_zero_config

FROZEN = 5  # rows


def table_before_and_after(config: str, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The position table, built and after five optimizer steps, from this rank's engine."""
    from deepspeed.utils import safe_get_full_fp32_param

    trainer: Any = build_on_rank(config, recipe, [])
    table = trainer.engine.module.clip.text.positional_embedding
    before = safe_get_full_fp32_param(table).clone()  # the master, of which bf16 is a copy
    batches = trainer.data.epoch(0)
    trainer.engine.train()
    for step in range(5):
        trainer.stepper.step(lambda: next(batches), step, step)
    return before, safe_get_full_fp32_param(table).clone()


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (2, "bf16"), (3, "fp32")])
def test_frozen_rows_are_bitwise_the_same_after_five_steps_on_two_ranks(ranks, tiny_set, tmp_path, stage, precision):
    changes = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    config = write_zero_config(tmp_path, stage, **changes)
    model = {"freeze_positions": FROZEN, "grad_checkpointing": True}
    recipe = write_recipe(
        tmp_path, tiny_set, model=model, batch={"size": 8}, optimizer={"lr": 0.01, "weight_decay": 0.5}
    )
    for before, after in ranks(2).run(table_before_and_after, str(config), str(recipe)):
        assert torch.equal(before[:FROZEN], after[:FROZEN])
        moved = (before != after).any(dim=1)
        assert moved[FROZEN : FROZEN + 4].all()


def test_a_run_from_a_long_clip_file_with_every_option(ranks, tiny_set, tmp_path):
    """Its weights, stretched no further; frozen layers and rows stay, the rest moves; the recipe is written down."""
    weights = tmp_path / "longclip.pt"
    torch.save(official.random_state(context=30, longclip=True), weights)
    recipe = write_recipe(
        tmp_path,
        tiny_set,
        model={
            "name": str(weights),
            "context_length": 40,
            "freeze": {"image": "all", "text": 1},
            "patch_dropout": 0.25,
            "grad_checkpointing": True,
        },
        data={"captions": {"sample": "sub", "probability": 0.5}},
        optimizer={"lr": 1e-3, "layer_decay": 0.7},
        schedule={"epochs": 1, "warmup_steps": 0},
    )
    assert ranks(2).run(train_on_rank, str(write_zero_config(tmp_path, 2)), str(recipe), []) == [0, 0]
    checkpoint = Run(next((tmp_path / "runs").iterdir())).latest()
    assert checkpoint is not None
    from pipeline.config import ModelConfig
    from pipeline.model import build_model, load_checkpoint

    start = build_model(ModelConfig(name=str(weights), context_length=40)).encoder_state()
    end = load_file(checkpoint.path / "open_clip_model.safetensors")
    moved = {name for name, tensor in end.items() if not torch.equal(tensor, start[name])}
    frozen = {
        n for n in start if n.startswith(("visual.", "text.token_emb", "text.pos", "text.transformer.resblocks.0"))
    }
    assert moved == set(start) - frozen
    model, meta = load_checkpoint(checkpoint.path)
    assert (model.context_length, meta["recipe"]) == (40, "tiny")


def test_a_run_starts_from_a_file_of_weights(ranks, tiny_set, tmp_path):
    from pipeline.config import ModelConfig
    from pipeline.model import build_model

    recipe = write_recipe(tmp_path, tiny_set)
    name = json.loads(recipe.read_text())["model"]["name"]
    torch.manual_seed(5)
    state = build_model(ModelConfig(name=name)).encoder_state()
    spec = build_model(ModelConfig(name=name)).spec
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, folder / "w.pt")
    (folder / "open_clip_config.json").write_text(json.dumps(spec))
    built = ranks(1).run(
        _table_of_built, str(write_zero_config(tmp_path, 0)), str(recipe), [f"model.init={folder / 'w.pt'}"]
    )
    assert torch.equal(built[0], state["text.positional_embedding"])


def _table_of_built(config: str, recipe: str, overrides: list[str]) -> torch.Tensor:
    trainer: Any = build_on_rank(config, recipe, overrides)
    table: torch.Tensor = trainer.engine.module.clip.text.positional_embedding.detach().clone()
    return table


def test_evaluate_and_export_take_a_file_of_weights(tiny_set, tmp_path):
    from export.command import export_checkpoint
    from export.runtime import Bundle
    from pipeline.evaluate.command import evaluate_model
    from pipeline.model import load_checkpoint

    path = tmp_path / "some.pt"
    torch.save(official.random_state(), path)
    metrics = evaluate_model(str(path), str(tiny_set), "test", 16, tmp_path / "runs", lambda _: None)
    assert metrics["model"] == str(path)
    assert "GELU is assumed" in metrics["lines"][0]
    with pytest.raises(ValueError, match="belongs to no run: say where the bundle goes, --out, and a set"):
        export_checkpoint(str(path), None, None, 18, tmp_path / "runs", print)
    said: list[str] = []
    export_checkpoint(str(path), tmp_path / "bundle", str(tiny_set), 18, Path("runs"), said.append)
    bundle, (model, _) = Bundle(tmp_path / "bundle"), load_checkpoint(path)
    from pipeline.model.tokenizer import CaptionTokenizer

    captions = ["a red bus", "word " * 100]
    with torch.no_grad():
        expected = model(input_ids=CaptionTokenizer(model.spec)(captions)).text_features
    torch.testing.assert_close(torch.from_numpy(bundle.encode_texts(captions)), expected, atol=1e-4, rtol=0)
    assert (bundle.tokenizer.num_captions, bundle.tokenizer.num_cut) == (2, 1)
