"""Writing and reading the checkpoints of a running job: complete or absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import Tensor

from pipeline.model import DualEncoder
from pipeline.runs import MANIFEST, MODEL_CONFIG, POINTER, WEIGHTS, Checkpoint, Run, read_json, sha256_of, write_json
from pipeline.train.distributed import Ranks
from shards.staging import sync

_ZERO_TAG = "zero"


def save_checkpoint(engine: Any, run: Run, ranks: Ranks, step: int, state: dict[str, Any], keep: int) -> Checkpoint:
    """Write a checkpoint aside, hash it, rename it, then point at it. Called by every rank.

    Args:
        engine: the DeepSpeed engine.
        run: its folder.
        ranks: all of them.
        step: optimizer steps done.
        state: the trainer's own state, JSON.
        keep: how many of the newest checkpoints stay.
    """
    folder = run.path / "checkpoints"
    final = folder / f"step-{step:08d}"
    aside = folder / f".{final.name}.writing"
    if ranks.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    ranks.barrier()
    engine.save_checkpoint(str(aside), tag=_ZERO_TAG, save_latest=False)
    encoders = full_encoder_state(engine)
    ranks.barrier()  # every rank has written its part
    if ranks.is_main:
        save_file(encoders, aside / WEIGHTS, metadata={"format": "pt"})
        write_json(aside / MODEL_CONFIG, engine.module.spec)
        _publish(aside, final, {"step": step, **state})
        write_pointer(folder, final.name)
        _drop_old(run, keep)
    ranks.barrier()
    return Checkpoint(final)


def load_zero_state(engine: Any, checkpoint: Checkpoint, ranks: Ranks) -> dict[str, Any]:
    """Load a checkpoint's weights and optimizer state into the engine; gives back the trainer's state.

    Raises:
        ValueError: the checkpoint is damaged, or was written by another number of ranks.
    """
    ranks.on_main(checkpoint.check)
    state: dict[str, Any] = read_json(checkpoint.path / MANIFEST)
    if state["world_size"] != ranks.world_size:
        raise ValueError(
            f"{checkpoint.path} was written by {state['world_size']} ranks and this launch has {ranks.world_size}: "
            f"resume with --num_gpus {state['world_size']}, or start a new run from its weights with "
            f"--set model.init={checkpoint.path}"
        )
    path, _ = engine.load_checkpoint(str(checkpoint.path), tag=_ZERO_TAG)
    if path is None:
        raise ValueError(f"DeepSpeed found no state in {checkpoint.path}")
    return state


def full_encoder_state(engine: Any) -> dict[str, Tensor]:
    """The whole encoders on the CPU, under open_clip's names; trained parameters from their fp32 masters.

    Collective: every rank calls it and gets the same.
    """
    model: DualEncoder = engine.module
    kept = model.clip.state_dict().keys()  # not every buffer is
    state = {name: buffer.detach().cpu().clone() for name, buffer in model.clip.named_buffers() if name in kept}
    for name, parameter in model.clip.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            value = safe_get_full_fp32_param(parameter)
        else:
            with GatheredParameters([parameter], enabled=engine.zero_optimization_partition_weights()):
                value = parameter.detach().clone()
        state[name] = value.cpu().contiguous()
    state["logit_scale"] = state["logit_scale"].reshape(())
    return state


def _publish(aside: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Hash and sync every file, write the manifest last, and rename the folder to its final name."""
    files = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_json(aside / MANIFEST, {**manifest, "files": files})
    for folder in {aside, *(p for p in aside.rglob("*") if p.is_dir())}:
        sync(folder)
    if final.exists():  # the same step, saved again after a resume
        shutil.rmtree(final)
    os.rename(aside, final)
    sync(final.parent)


def write_pointer(folder: Path, name: str) -> None:
    """Point `latest` at a checkpoint, in one rename."""
    aside = folder / f".{POINTER}.tmp"
    aside.write_text(name + "\n", encoding="utf-8")
    sync(aside)
    os.replace(aside, folder / POINTER)
    sync(folder)


def _drop_old(run: Run, keep: int) -> None:
    for old in run.checkpoints()[:-keep]:
        shutil.rmtree(old.path)
