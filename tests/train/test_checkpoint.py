"""A checkpoint is complete or absent, whatever happens while it is written; the best one stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.runs import MANIFEST, WEIGHTS, Run, find_checkpoint, write_json
from pipeline.train import checkpoint
from tests.ranks import Ranks
from tests.train.kill import run_killed
from tests.train.tiny import build_on_rank, losses_of, train_and_hear, write_recipe

SAVES = ((1, 50.0), (2, 90.0), (2, 90.0), (3, 60.0), (4, None))  # (step, score); step 2 is written again


def _save(run: Path, step: int, score: float | None, size: int = 64, keep: int = 1) -> None:
    """Write a checkpoint by the code that writes real ones, with tensors of a few bytes."""
    weight = torch.arange(size, dtype=torch.float32) + step
    norms = {"w": float(weight.double().norm())}
    training = {"exp_avg/w": weight / 2, "exp_avg_sq/w": weight / 3, "step/w": torch.tensor(step)}
    manifest = {"step": step, "score": score, "ema_decay": None}
    checkpoint._write(Run(run), training, {"w": weight}, norms, {"model_cfg": {}}, manifest, keep)


def _saves(run: Path) -> None:
    for step, score in SAVES:
        _save(run, step, score)


@pytest.mark.long
def test_killed_at_any_call_the_newest_and_the_best_are_found(tmp_path: Path) -> None:
    """Of five saves: never half a checkpoint, never an older one than before, never without the best so far."""
    writers = ((checkpoint, "save_file"),)
    calls = run_killed(lambda: _saves(tmp_path / "whole"), -1, writers)
    assert calls > 80
    newest = []
    for deadline in range(1, calls + 1):
        folder = tmp_path / f"killed-{deadline}"
        assert run_killed(lambda folder=folder: _saves(folder), deadline, writers) == -signal.SIGKILL  # type: ignore[misc]
        run = Run(folder)
        for found in run.checkpoints():
            found.check()
        serial = max((c.serial for c in run.checkpoints()), default=0)
        newest.append(serial)
        if serial:
            best, latest = run.best(), run.latest()
            assert best is not None
            assert latest is not None
            assert latest.serial == serial
            assert best.score == max(score for _, score in SAVES[:serial] if score is not None)
        _save(folder, 9, 10.0)  # the next launch saves over whatever was left
        again = run.latest()
        assert again is not None
        assert again.step == 9
        assert [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith(".")] == []
    assert newest == sorted(newest)
    assert set(newest) == set(range(len(SAVES) + 1))


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    _saves(tmp_path)
    run = Run(tmp_path)
    assert [c.path.name for c in run.checkpoints()] == ["step-00000002-2", "step-00000004"]
    write_json(tmp_path / "run.json", {"recipe": "a", "created": 1.0})
    assert find_checkpoint(f"{tmp_path}:best", tmp_path).step == 2
    assert find_checkpoint("a:best", tmp_path).step == 2
    assert find_checkpoint(":best", tmp_path).step == 2
    assert find_checkpoint("a", tmp_path).step == 4


def test_a_run_that_was_never_evaluated_has_no_best(tmp_path: Path) -> None:
    _save(tmp_path, 1, None)
    write_json(tmp_path / "run.json", {"recipe": "a", "created": 1.0})
    with pytest.raises(ValueError, match="no checkpoint that was evaluated"):
        find_checkpoint("a:best", tmp_path)


def test_a_folder_without_its_manifest_or_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1, None)
    (only,) = Run(tmp_path).checkpoints()
    weights = only.path / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert Run(tmp_path).latest() is None
    weights.write_bytes(content)
    assert Run(tmp_path).latest() == only
    (only.path / MANIFEST).unlink()
    assert Run(tmp_path).latest() is None


def test_what_is_not_the_model_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back other bytes than it was given."""
    write = checkpoint.save_file

    def altered(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        write({name: tensor * 2 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", altered)
    with pytest.raises(ValueError, match="is not the model: w; is the disk sound"):
        _save(tmp_path, 1, None)
    assert Run(tmp_path).checkpoints() == []


# a full disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 72 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=72m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("noticed", ["before", "while writing"])
def test_a_full_disk_leaves_the_last_checkpoint_and_room(
    noticed: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if noticed == "while writing":
        monkeypatch.setattr(checkpoint, "_SPARE_BYTES", -(1 << 30))
    _save(small_disk, 1, None, size=4 << 20)  # three tensors of 16 MB
    with pytest.raises(OSError, match=r"MB are free|No space left") as raised:
        _save(small_disk, 2, None, size=4 << 20)
    assert raised.value.errno == errno.ENOSPC
    (only,) = Run(small_disk).checkpoints()
    only.check()
    assert only.step == 1
    assert os.listdir(small_disk / "checkpoints") == [only.path.name]


def test_a_run_goes_on_when_the_disk_is_full(ranks: Ranks, tiny_set: Path, tmp_path: Path, small_disk: Path) -> None:
    """A checkpoint of the tiny model takes 20 MB: two fit beside what stays free for logs, the third does not."""
    several = {"every_steps": 1, "keep": 9}
    recipe = str(write_recipe(tmp_path, tiny_set, checkpoint=several))
    overrides = [f"run.root={small_disk}", "run.name=a"]
    (error, said), (other, _) = ranks(2).run(train_and_hear, "zero2", recipe, overrides)
    assert "MB are needed and" in str(error), "the last checkpoint must be saved"
    assert other == error
    run = Run(small_disk / "a")
    assert len(losses_of(run.path)) == 8
    kept = run.checkpoints()
    assert kept
    assert kept[-1].step < 8
    for found in kept:
        found.check()
    warnings = [line for line in said if line.startswith("warning")]
    assert f"warning: the checkpoint of step {kept[-1].step + 1} was not saved" in warnings[0]
    assert f"{kept[-1].path} stays the newest; going on" in warnings[0]


# what lies in one -----------------------------------------------------------------------------------------------------


def _saved_state(config: str, recipe: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Train one step, save; the checkpoint's path and the live weights, gathered parameter by parameter."""
    from deepspeed.runtime.zero import GatheredParameters

    trainer = build_on_rank(config, recipe, [])
    trainer.stepper.micro_batch(next(trainer.data.epoch(0)), 0, 0)
    trainer.step = 1
    path = str(trainer.save().path)
    live = {}
    for name, parameter in trainer.engine.module.clip.named_parameters():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            live[name] = parameter.detach().clone()
    return path, live


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_weights_are_the_live_models(stage: int, ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    recipe = write_recipe(tmp_path, tiny_set)
    (path, live), (_, other) = ranks(2).run(_saved_state, f"zero{stage}", str(recipe))
    saved = load_file(Path(path) / WEIGHTS)
    assert saved.pop("logit_scale").shape == ()
    for name, tensor in saved.items():
        if name in live:  # the others are buffers
            assert torch.equal(tensor, live[name]), name
            assert torch.equal(other[name], live[name]), name
    assert live.keys() - {"logit_scale"} <= saved.keys()


def test_open_clip_loads_the_checkpoint_folder(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """For CLIP-type models the folder is one of open_clip's own `local-dir:` models."""
    import open_clip

    recipe = write_recipe(tmp_path, tiny_set)
    ((path, live),) = ranks(1).run(_saved_state, "zero2", str(recipe))
    model = open_clip.create_model(f"local-dir:{path}")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.reshape(-1), live[name].reshape(-1)), name


def test_manifest_names_every_file(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    ((path, _),) = ranks(1).run(_saved_state, "zero2", str(recipe))
    manifest = json.loads((Path(path) / MANIFEST).read_text())
    found = {str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file()}
    assert found == {*manifest["files"], MANIFEST}
    assert (manifest["step"], manifest["world_size"], manifest["recipe"]) == (1, 1, "tiny")
    assert os.path.basename(path) == "step-00000001"
