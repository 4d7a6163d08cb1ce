"""The DeepSpeed engine: its JSON owns ZeRO, precision, offload and clipping; the recipe owns everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch

from pipeline.config import find_config
from pipeline.model import DualEncoder
from pipeline.training_sections import BatchConfig

_OWNED_BY_THE_RECIPE = {
    "train_batch_size": "batch.size",
    "train_micro_batch_size_per_gpu": "batch.size",
    "gradient_accumulation_steps": "batch.accumulate",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "steps_per_print": "run.log_every",
    "tensorboard": "run",
    "wandb": "run",
    "csv_monitor": "run",
}


def load_deepspeed_config(name: str) -> dict[str, Any]:
    """Read a DeepSpeed JSON by path or by name in configs/.

    Raises:
        ValueError: not JSON, states what the recipe states, or leaves out gradient clipping, whose default has changed
            between DeepSpeed releases.
        FileNotFoundError: no such file or name.
    """
    path: Path = find_config(name, "", ".json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"DeepSpeed config {path} is not JSON: {error}") from error
    for key, recipe_key in _OWNED_BY_THE_RECIPE.items():
        if key in config:
            raise ValueError(f"{path.name} states '{key}', which the recipe owns: remove it there, set {recipe_key}")
    if "gradient_clipping" not in config:
        raise ValueError(f"{path.name} does not state 'gradient_clipping' (0.0 is off): DeepSpeed's default varies")
    return config


def micro_batch_size(batch: BatchConfig, world_size: int) -> int:
    """Pairs per rank and micro-batch.

    Raises:
        ValueError: the batch does not divide by ranks x accumulation; names the nearest size that does.
    """
    parts = world_size * batch.accumulate
    if batch.size % parts:
        nearest = max(1, round(batch.size / parts)) * parts
        raise ValueError(
            f"batch.size {batch.size} does not divide into {world_size} ranks x {batch.accumulate} micro-batches; "
            f"the nearest that does is {nearest}"
        )
    return batch.size // parts


def make_engine(
    model: DualEncoder, optimizer: torch.optim.Optimizer, config: dict[str, Any], batch: BatchConfig, micro_batch: int
) -> Any:
    """Wrap the model and optimizer; the engine averages gradients over ranks and micro-batches."""
    # Some wrappers make AdamW's state by a step with zero gradients, which would decay the weights before they train.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=[p for group in optimizer.param_groups for p in group["params"]],
        config={
            **config,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": batch.accumulate,
            "steps_per_print": 1 << 40,  # our own log says it
            "zero_force_ds_cpu_optimizer": False,  # with offload, torch's AdamW steps on the CPU
        },
    )
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in getattr(engine.optimizer, "optimizer", engine.optimizer).state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()  # that step did not count
    return engine
