"""Whole training runs on real ranks: every ZeRO stage, what a run leaves behind, going on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pipeline.runs import WEIGHTS, Run, write_json
from pipeline.train.entry import Launch, read_recipe, stored_recipe
from pipeline.train.run_dir import open_run
from tests.ranks import Ranks
from tests.train.tiny import losses_of, train_on_rank, write_recipe


def _weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = Run(run).latest()
    assert checkpoint is not None
    return load_file(checkpoint.path / WEIGHTS)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks under ZeRO-2: 2 epochs of 4 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = write_recipe(folder, tiny_set)
    assert ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole"]) == [0, 0]
    return folder / "runs" / "whole"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_stage_trains_to_the_same_weights(
    stage: int, ranks: Ranks, tiny_set: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    assert ranks(2).run(train_on_rank, f"zero{stage}", str(recipe), ["run.name=other"]) == [0, 0]
    other = tmp_path / "runs" / "other"
    assert losses_of(other) == pytest.approx(losses_of(uninterrupted), abs=1e-5)
    expected, got = _weights(uninterrupted), _weights(other)
    assert got.keys() == expected.keys()
    # AdamW turns the zero gradient of attention's key biases into noise of the learning rate: not compared.
    for name in (n for n in expected if not n.endswith("attn.in_proj_bias")):
        torch.testing.assert_close(got[name], expected[name], atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("world", [1, 4])
def test_number_of_ranks_does_not_change_thelosses_of(
    world: int, ranks: Ranks, tiny_set: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    ranks(world).run(train_on_rank, "zero2", str(recipe), ["run.name=other"])
    assert losses_of(tmp_path / "runs" / "other") == pytest.approx(losses_of(uninterrupted), abs=1e-5)


def test_a_run_leaves_everything_that_makes_it_reproducible(uninterrupted: Path) -> None:
    info = json.loads((uninterrupted / "run.json").read_text())
    assert (info["state"], info["step"], info["world_size"]) == ("finished", 8, 2)
    assert {"torch", "deepspeed", "open_clip_torch"} <= info["versions"].keys()
    assert "gamma: 0.5" in (uninterrupted / "recipe.yaml").read_text()
    assert json.loads((uninterrupted / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 2
    assert list((uninterrupted / "tensorboard").glob("events.*"))
    tables = sorted((uninterrupted / "evaluations").glob("val-step-*.json"))
    assert [t.stem for t in tables] == ["val-step-00000004", "val-step-00000008"]
    assert json.loads(tables[0].read_text())["images"] == 24
    steps = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss" in s] == list(range(1, 9))
    assert {s["negatives"] for s in steps if "loss" in s} == {15}


def test_loss_falls(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """Of InfoNCE: HN-CLIP's own loss may rise while the margins grow with the text encoder's confidence."""
    recipe = write_recipe(tmp_path, tiny_set, objective={"name": "infonce"}, schedule={"epochs": 6})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
    losses = losses_of(tmp_path / "runs" / "a")
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_only_complete_checkpoints_stay(uninterrupted: Path) -> None:
    folder = uninterrupted / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000004", "step-00000008"]
    for checkpoint in Run(uninterrupted).checkpoints():
        checkpoint.check()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stop_after", [1, 4, 6])
def test_resumed_run_is_bitwise_the_uninterrupted_one(
    world: int, stop_after: int, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """Stopped by SIGTERM in the first epoch, exactly at its end, or in the second."""
    recipe = write_recipe(tmp_path, tiny_set)
    whole, cut = ["run.name=whole"], ["run.name=cut"]
    ranks(world).run(train_on_rank, "zero2", str(recipe), whole)
    assert ranks(world).run(_train_until, "zero2", str(recipe), cut, stop_after) == [143] * world
    assert Run(tmp_path / "runs" / "cut").info["state"] == "stopped"
    assert len(losses_of(tmp_path / "runs" / "cut")) == stop_after
    assert ranks(world).run(train_on_rank, "zero2", str(recipe), cut, "auto") == [0] * world
    assert losses_of(tmp_path / "runs" / "cut") == losses_of(tmp_path / "runs" / "whole")
    expected, got = _weights(tmp_path / "runs" / "whole"), _weights(tmp_path / "runs" / "cut")
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def _train_until(config: str, recipe: str, overrides: list[str], step: int) -> int:
    """Train, with a SIGTERM to the last rank alone during a step: the ranks agree to stop after it."""
    import torch.distributed as dist

    from pipeline.train.loop import Trainer

    original = Trainer._optimizer_step

    def step_and_signal(self: Trainer, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        if self.step == step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer._optimizer_step = step_and_signal  # type: ignore[method-assign]
    try:
        return train_on_rank(config, recipe, overrides)
    finally:
        Trainer._optimizer_step = original  # type: ignore[method-assign]


def test_accumulated_micro_batches_are_one_step(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, batch={"size": 32, "accumulate": 2}, schedule={"epochs": 1})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
    lines = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["negatives"]) for line in lines if "loss" in line] == [(1, 15), (2, 15)]


def test_a_split_smaller_than_one_step_is_refused(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, batch={"size": 128, "accumulate": 8})
    with pytest.raises(ValueError, match="64 pairs are fewer than one step of 128"):
        ranks(1).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])


def test_explicit_resume_of_what_is_not_there_is_an_error(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    with pytest.raises(ValueError, match="neither a checkpoint, nor a run"):
        ranks(1).run(train_on_rank, "zero2", str(recipe), [f"run.root={tmp_path / 'runs'}"], str(tmp_path / "gone"))
    assert not (tmp_path / "runs").exists()


def test_pipeline_train_alone_and_resume_auto_says_that_it_starts_anew(tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "train", "--recipe", str(recipe), "--resume", "auto"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nothing to resume: starting from the beginning" in done.stdout
    assert "1 rank(s) on cpu" in done.stdout
    assert f"weights in {tmp_path}/runs/tiny/checkpoints/step-00000004" in done.stdout


def test_resume_with_another_recipe_names_the_difference(ranks: Ranks, tiny_set: Path, uninterrupted: Path) -> None:
    recipe = write_recipe(uninterrupted.parents[1], tiny_set)
    with pytest.raises(ValueError, match=r"optimizer\.lr: 0\.001 then, 0\.002 now"):
        ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole", "optimizer.lr=0.002"], "auto")


def test_a_run_that_goes_on_from_a_path_may_live_and_speak_otherwise(uninterrupted: Path) -> None:
    checkpoint = str(uninterrupted / "checkpoints" / "step-00000004")
    given = read_recipe(Launch("zero2", None, ["run.log_every=7", "checkpoint.keep=5"], checkpoint))
    assert (given.run.log_every, given.checkpoint.keep) == (7, 5)
    assert given.run.name == "whole", "said when the run began, and not now"
    with pytest.raises(ValueError, match=r"batch\.size: 16 then, 32 now"):
        read_recipe(Launch("zero2", None, ["batch.size=32"], checkpoint))


def test_a_run_that_is_still_running_is_not_gone_on_with(uninterrupted: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(uninterrupted, tmp_path / "whole")))
    recipe = stored_recipe(run.path)
    process = psutil.Process(os.getppid())
    live = {"host": socket.gethostname(), "pid": process.pid, "began": process.create_time()}
    write_json(run.path / "run.json", {**run.info, "state": "running", "process": live})
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"root": str(tmp_path)})})
    for resume in ("auto", str(run.path)):
        with pytest.raises(ValueError, match=rf"still running, as process {process.pid}"):
            open_run(recipe, resume)
    write_json(run.path / "run.json", {**run.info, "process": {**live, "began": live["began"] - 1000}})
    assert open_run(recipe, "auto")[1] is not None, "that process is gone"


def test_two_launches_at_once_have_two_folders(uninterrupted: Path, tmp_path: Path) -> None:
    recipe = stored_recipe(uninterrupted)
    unnamed = recipe.run.model_copy(update={"root": str(tmp_path / "runs"), "name": None})
    recipe = recipe.model_copy(update={"run": unnamed})
    assert [open_run(recipe, None)[0].path.name for _ in range(3)] == ["tiny", "tiny-2", "tiny-3"]


def test_an_existing_run_is_not_written_over(ranks: Ranks, tiny_set: Path, uninterrupted: Path) -> None:
    recipe = write_recipe(uninterrupted.parents[1], tiny_set)
    with pytest.raises(ValueError, match="already holds a run"):
        ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole"])


def test_damaged_checkpoint_is_refused(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    ranks(1).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
    checkpoint = Run(tmp_path / "runs" / "a").latest()
    assert checkpoint is not None
    state = checkpoint.path / "training_state.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    with pytest.raises(ValueError, match=rf"damaged: {state.name} has changed"):
        ranks(1).run(train_on_rank, "zero2", None, [], str(checkpoint.path))


def test_start_from_another_run(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=first"])
    # One step at a learning rate of nothing: the run ends with what it began with.
    tiny = ["optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=second", f"model.init={recipe.stem}", *tiny])
    first, second = _weights(tmp_path / "runs" / "first"), _weights(tmp_path / "runs" / "second")
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-7, rtol=0, msg=name)


def test_missing_start_says_how_to_make_it(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    with pytest.raises(ValueError, match=r"train it first: deepspeed launcher/train\.py .* --recipe align"):
        ranks(1).run(train_on_rank, "zero2", str(recipe), ["model.init=align"])
    assert not (tmp_path / "runs" / "tiny").exists(), "the name stays free"


def test_damaged_shards_stop_the_run_at_its_start(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_set, damaged)
    shard = next((damaged / "train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-100])
    recipe = write_recipe(tmp_path, damaged)
    with pytest.raises(ValueError, match=shard.name):
        ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
