"""A checkpoint is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.runs import MANIFEST, WEIGHTS, Run
from pipeline.train import checkpoint
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, write_recipe


def _save_twice(folder: Path) -> None:
    """Checkpoints of steps 1 and 2 in a run folder, keeping one; files stand for what DeepSpeed writes."""
    for step in (1, 2):
        final = folder / "checkpoints" / f"step-{step:08d}"
        aside = final.with_name(f".{final.name}.writing")
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "zero").mkdir(parents=True)
        for name in (WEIGHTS, "zero/state.pt"):
            with open(aside / name, "wb") as file:
                file.write(name.encode() * 1000 * step)
        checkpoint._publish(aside, final, {"step": step})
        checkpoint.write_pointer(final.parent, final.name)
        checkpoint._drop_old(Run(folder), keep=1)


def _save(folder: Path, deadline: int) -> int:
    """Save in a child that is killed at the `deadline`-th call that changes the disk; the number of calls, or -9."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = _count_calls(deadline)
        _save_twice(folder)
        os.write(write, str(len(calls)).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(answer)


def _count_calls(deadline: int) -> list[str]:
    """Make every call that opens, syncs, renames or removes add its name to a list; SIGKILL at one of them."""
    calls: list[str] = []
    for module, name in (
        (builtins, "open"),
        (os, "open"),
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (os, "rmdir"),
    ):
        setattr(module, name, _counted(getattr(module, name), name, calls, deadline))
    return calls


def _counted(function: Callable[..., Any], name: str, calls: list[str], deadline: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call


@pytest.mark.long
def test_killed_at_any_call_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    """Of two saves: never half a checkpoint, never none once there was one, never an older one than before."""
    calls = _save(tmp_path / "whole", -1)
    assert calls > 20
    newest = []
    for deadline in range(1, calls + 1):
        folder = tmp_path / f"killed-{deadline}"
        assert _save(folder, deadline) == -signal.SIGKILL
        found = Run(folder).latest()
        if found is not None:
            found.check()
        newest.append(found.step if found else 0)
        assert _save(folder, -1) > 0, "the next run saves over whatever was left"
        again = Run(folder).latest()
        assert again is not None
        assert again.step == 2
    assert newest == sorted(newest)
    assert set(newest) == {0, 1, 2}


def test_a_folder_without_its_manifest_or_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    assert _save(tmp_path, -1) > 0
    (only,) = Run(tmp_path).checkpoints()
    weights = only.path / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert Run(tmp_path).latest() is None
    weights.write_bytes(content)
    assert Run(tmp_path).latest() == only
    (only.path / MANIFEST).unlink()
    assert Run(tmp_path).latest() is None


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
