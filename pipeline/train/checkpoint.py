"""Writing and reading the checkpoints of a running job: complete or absent, by parameter name, for any number of ranks.

open_clip_model.safetensors   the encoders in open_clip's names: averaged weights where the recipe keeps an average
open_clip_config.json         what open_clip builds them from
training_state.safetensors    weight/NAME and ema/NAME (where they are not what the encoders hold), exp_avg/NAME,
                              exp_avg_sq/NAME, step/NAME: fp32, of every parameter that trains
adapter/                      adapters alone, where a run has them (`pipeline.model.adapters.files`): the encoders have
                              them merged, and what is frozen under them comes from the recipe's model
manifest.json                 where the run stands, sizes and hashes of the files; written last
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.model.adapters.files import AdapterFiles, adapter_files
from pipeline.runs import MANIFEST, MODEL_CONFIG, WEIGHTS, Checkpoint, Run, read_json, sha256_of, write_json
from pipeline.train.weights import MOMENTS, TrainedWeights
from shards.staging import sync

STATE = "training_state.safetensors"
ADAPTER = "adapter"
_SPARE_BYTES = 16 << 20  # left free on the disk for the logs


def save_checkpoint(weights: TrainedWeights, run: Run, state: dict[str, Any], keep: int) -> Checkpoint:
    """Write a checkpoint aside, hash it, rename it. Called by every rank.

    Args:
        weights: what trains, and the engine with the rest of the model.
        run: its folder.
        state: where the run stands, JSON, with `step`; `score` is what the best checkpoint is chosen by, or None.
        keep: how many of the newest checkpoints stay; the best one stays as well.

    Raises:
        OSError: on every rank; the disk is full, or cannot be written. Earlier checkpoints are as they were.
        ValueError: on every rank; a weight is not finite, or what was written is not what the model holds.
    """
    found = weights.read()
    steps = weights.steps()
    encoders = encoder_state(weights, found.get("ema", found["weight"]))
    norms = _live_norms(weights, found["weight"])
    manifest = {**state, "scaler": weights.scaler(), "ema_decay": weights.ema_decay}
    model = weights.engine.module
    if model.adapters is not None:
        manifest["backbone"] = model.adapters.frozen

    def write() -> Path:
        tensors = {f"{m}/{name}": found[m][name] for m in MOMENTS for name in steps}
        tensors |= {f"step/{name}": torch.tensor(count) for name, count in steps.items()}
        tensors |= {f"weight/{n}": t for n, t in found["weight"].items() if "ema" in found or n not in encoders}
        tensors |= {f"ema/{n}": t for n, t in found.get("ema", {}).items() if n not in encoders}
        apart = None if model.adapters is None else adapter_files(model, found.get("ema", found["weight"]))
        return _write(run, tensors, encoders, norms, model.spec, manifest, keep, apart)

    return Checkpoint(weights.ranks.on_main(write))


def load_training_state(weights: TrainedWeights, checkpoint: Checkpoint) -> dict[str, Any]:
    """Set weights, moments and everything frozen from a checkpoint that has been checked; gives its manifest.

    Every rank reads what it needs. The number of ranks and the ZeRO stage need not be those that wrote it.

    Raises:
        ValueError: the checkpoint is of other parameters, or says nothing of an average that the recipe keeps.
    """
    manifest: dict[str, Any] = read_json(checkpoint.path / MANIFEST)
    _check_backbone(weights, manifest, checkpoint)
    with (
        safe_open(checkpoint.path / WEIGHTS, "pt") as encoders,
        safe_open(checkpoint.path / STATE, "pt") as training,
    ):
        known = set(encoders.keys())
        stored = {key.removeprefix("step/") for key in list(training.keys()) if key.startswith("step/")}
        if stored != weights.parameters.keys():
            other = sorted(stored ^ weights.parameters.keys())
            raise ValueError(f"{checkpoint.path} is of a run that trains other parameters, first {other[0]}")
        averaged = manifest["ema_decay"] is not None
        if weights.ema_decay is not None and not averaged:
            raise ValueError(f"{checkpoint.path} holds no averaged weights: resume without ema.decay")

        def tensor(kind: str, name: str) -> Tensor:
            in_encoders = name in known and (kind == "ema" or (kind == "weight" and not averaged))
            return encoders.get_tensor(name) if in_encoders else training.get_tensor(f"{kind}/{name}")

        weights.set(tensor, {name: int(training.get_tensor(f"step/{name}")) for name in stored})
        if weights.engine.module.adapters is None:
            _load_the_rest(weights, encoders)
    weights.set_scaler(manifest["scaler"])
    weights.engine.global_steps = manifest["step"]
    return manifest


def encoder_state(weights: TrainedWeights, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole encoders on the CPU under open_clip's names, on the main rank. Collective under ZeRO-3.

    Args:
        weights: of the engine that holds the model.
        trained: fp32 values of everything that trains, on the main rank.
    """
    clip = weights.engine.module.clip
    kept = clip.state_dict().keys()  # not every buffer is
    state = {name: buffer.detach().cpu().clone() for name, buffer in clip.named_buffers() if name in kept}
    for name, _ in clip.named_parameters():
        if name not in weights.parameters:
            state[name] = weights.live(name).cpu().contiguous()
        elif weights.ranks.is_main:
            state[name] = trained[name]
    if weights.ranks.is_main:
        if weights.engine.module.adapters is not None:
            state = weights.engine.module.adapters.merged(state)
        state["logit_scale"] = state["logit_scale"].reshape(())
    return state


def _check_backbone(weights: TrainedWeights, manifest: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Merged encoders do not give back what their adapters stand on: the recipe's model must still be the same."""
    adapters = weights.engine.module.adapters
    if adapters is not None and manifest.get("backbone") != adapters.frozen:
        raise ValueError(
            f"{checkpoint.path}: its adapters were trained on other frozen weights than the recipe's model has now; "
            "have the files behind model.name, model.pretrained or model.init changed, or is there a newer run of that "
            "name? Put them back, or name the first ones in the run's recipe.yaml"
        )


def _load_the_rest(weights: TrainedWeights, encoders: Any) -> None:
    """Frozen parameters and buffers, which the run may have taken from another run that has moved on since."""
    clip = weights.engine.module.clip
    for name, buffer in clip.named_buffers():
        if name in encoders.keys():  # noqa: SIM118 - not a mapping
            buffer.copy_(encoders.get_tensor(name))
    for name, parameter in clip.named_parameters():
        if name not in weights.parameters:
            partitioned = weights.engine.zero_optimization_partition_weights()
            with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
                if not partitioned or weights.ranks.is_main:
                    parameter.copy_(encoders.get_tensor(name).reshape(parameter.shape))


def _live_norms(weights: TrainedWeights, masters: dict[str, Tensor]) -> dict[str, float]:
    """Norms of the trained parameters as the model computes with them, compared on the main rank with the masters."""
    norms, wrong = {}, []
    for name in weights.parameters:
        live = weights.live(name).cpu()
        if weights.ranks.is_main:
            if not bool(torch.equal(live, masters[name].to(live.dtype))):
                wrong.append(name)
            norms[name] = float(masters[name].double().norm())

    def refuse() -> None:
        if wrong:
            raise ValueError(
                f"{len(wrong)} parameters are not finite, or differ between the model and its optimizer, first "
                f"{wrong[0]}: not saved; resume from an earlier checkpoint"
            )

    weights.ranks.on_main(refuse)
    return norms


def _write(
    run: Run,
    training: dict[str, Tensor],
    encoders: dict[str, Tensor],
    norms: dict[str, float],
    spec: dict[str, Any],
    manifest: dict[str, Any],
    keep: int,
    adapter: AdapterFiles | None = None,
) -> Path:
    folder = run.path / "checkpoints"
    aside = folder / f".step-{manifest['step']:08d}.writing"
    _clear_leftovers(folder)
    aside.mkdir(parents=True)
    try:
        apart = {} if adapter is None else adapter.tensors
        _check_room(folder, [t for part in (training, encoders, *apart.values()) for t in part.values()])
        _save_tensors(training, aside / STATE)
        _save_tensors(encoders, aside / WEIGHTS)
        _check_written(aside, norms, encoders, averaged=manifest["ema_decay"] is not None)
        write_json(aside / MODEL_CONFIG, spec)
        if adapter is not None:
            _write_adapter(adapter, aside / ADAPTER)
        final = _publish(aside, manifest, run)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk needs the room for its logs
        raise
    _drop_old(run, keep)
    return final


def _write_adapter(files: AdapterFiles, folder: Path) -> None:
    folder.mkdir()
    for name, tensors in files.tensors.items():
        _save_tensors(tensors, folder / name)
    for name, content in files.json.items():
        write_json(folder / name, content)
    sync(folder)


def _check_room(folder: Path, tensors: list[Tensor]) -> None:
    needed = sum(t.numel() * t.element_size() for t in tensors) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MB are needed and {free >> 20} MB are free in {folder}")


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what the library makes of every OSError
        raise OSError(errno.ENOSPC if "os error 28" in str(error) else errno.EIO, f"{path}: {error}") from error


def _check_written(aside: Path, norms: dict[str, float], encoders: dict[str, Tensor], averaged: bool) -> None:
    """Read the files back: every key of the model, and the norms of its weights."""
    try:
        with safe_open(aside / WEIGHTS, "pt") as file, safe_open(aside / STATE, "pt") as training:
            wrong = sorted(set(file.keys()) ^ encoders.keys())
            for name, norm in norms.items():
                apart = averaged or name not in encoders
                read = training.get_tensor(f"weight/{name}") if apart else file.get_tensor(name)
                if float(read.double().norm()) != norm:
                    wrong.append(name)
    except SafetensorError as error:
        raise OSError(errno.EIO, f"what was written to {aside} cannot be read back: {error}") from error
    if wrong:
        raise ValueError(f"what was written to {aside} is not the model: {', '.join(wrong[:3])}; is the disk sound?")


def _publish(aside: Path, manifest: dict[str, Any], run: Run) -> Path:
    """Hash and sync every file, write the manifest last, and rename the folder to a name that is still free.

    A step that was saved before, by a launch that the run went back behind, keeps its folder until the new one is
    there; `serial` tells which is newer.
    """
    files = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(aside))] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    serial = max((c.serial for c in run.checkpoints()), default=0) + 1
    write_json(aside / MANIFEST, {**manifest, "serial": serial, "files": files})
    sync(aside)
    final, number = aside.with_name(f"step-{manifest['step']:08d}"), 1
    while final.exists():
        number += 1
        final = aside.with_name(f"step-{manifest['step']:08d}-{number}")
    os.rename(aside, final)
    sync(final.parent)
    return final


def _drop_old(run: Run, keep: int) -> None:
    """Remove what is neither among the newest nor the best, and what a newer checkpoint of the same step replaces."""
    checkpoints = run.checkpoints()
    newest_of_step = {c.step: c for c in checkpoints}  # they come oldest first
    stay = [c for c in checkpoints if newest_of_step[c.step] == c][-keep:]
    best = run.best()
    for checkpoint in checkpoints:
        if checkpoint not in stay and checkpoint != best:
            doomed = checkpoint.path.with_name(f".{checkpoint.path.name}.deleting")
            os.rename(checkpoint.path, doomed)
            shutil.rmtree(doomed)


def _clear_leftovers(folder: Path) -> None:
    """What a save or a removal that was killed has left."""
    for pattern in (".step-*.writing", ".step-*.deleting"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)
