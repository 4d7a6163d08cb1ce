"""From a recipe and a DeepSpeed config to a finished run. The launcher and `pipeline train` both come here."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import DEFAULT_RECIPE, Recipe, load_recipe, override, parse_recipe
from pipeline.train.explain import explained, one_line
from pipeline.train.launch_env import set_rank_variables
from pipeline.train.stop import EXIT_BAD_INPUT, Stopped

_SECONDS_FOR_THE_MAIN_RANK = 10.0
EXIT_LOST_A_RANK = 1
# What gloo and NCCL say when another process of the group is gone.
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote process exited", "was aborted")


@dataclass
class Launch:
    """What the command line says. `recipe` is a name or path, `resume` is None, `auto`, a run or a checkpoint."""

    config: str
    recipe: str | None = None
    overrides: Sequence[str] = field(default_factory=list)
    resume: str | None = None


def main(launch: Launch) -> int:
    """Train, and turn what users get wrong into one line; gives the exit code."""
    try:
        return train(launch)
    except (ValueError, OSError) as error:
        return _refuse(one_line(str(error)))
    except RuntimeError as error:
        if (known := explained(error)) is not None:
            return _refuse(known)
        if not any(sign in str(error) for sign in _GONE):
            raise
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: another rank is gone; its own error is above", file=sys.stderr, flush=True)
        return EXIT_LOST_A_RANK


def _refuse(line: str) -> int:
    from pipeline.train.distributed import leave

    _report(line)
    leave()
    return EXIT_BAD_INPUT


def _report(line: str) -> None:
    """One line for the user. What is wrong on every rank is said by the main one: the launcher ends the others.

    The process group still stands: a main rank without such an error waits, in a collective, until this one has spoken.
    """
    if os.environ.get("PIPELINE_DEBUG"):
        traceback.print_exc()
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_SECONDS_FOR_THE_MAIN_RANK)
    print(f"error{f' on rank {rank}' if rank else ''}: {line}", file=sys.stderr, flush=True)


def read_recipe(launch: Launch) -> Recipe:
    """The recipe of this launch; going on with a run means going on with its recipe.

    Raises:
        ValueError: a resumed run and the command line disagree; names where.
    """
    from pipeline.runs import Run, find_checkpoint

    if launch.resume in (None, "auto"):
        return load_recipe(launch.recipe or DEFAULT_RECIPE, launch.overrides)
    root = next((o.split("=", 1)[1] for o in launch.overrides if o.startswith("run.root=")), "runs")
    run = Run(find_checkpoint(launch.resume, Path(root)).path.parent.parent)
    stored = stored_recipe(run.path)
    given = load_recipe(launch.recipe, launch.overrides) if launch.recipe else override(stored, launch.overrides)
    check_same(stored, given, run.path)
    return given


def stored_recipe(run: Path) -> Recipe:
    """The resolved recipe of a run."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.load(run / "recipe.yaml"))
    assert isinstance(values, dict)
    return parse_recipe(values, str(run / "recipe.yaml"))


def check_same(stored: Recipe, given: Recipe, run: Path) -> None:
    """A run goes on with the recipe it began with; only where it lives and how often it speaks may change."""
    before, now = _flat(stored.model_dump()), _flat(given.model_dump())
    different = [k for k in sorted(before | now) if before.get(k) != now.get(k) and not k.startswith(_FREE)]
    if different:
        changes = ", ".join(f"{k}: {before.get(k)} then, {now.get(k)} now" for k in different[:4])
        raise ValueError(
            f"{run} was started with another recipe ({changes}): "
            "resume it without --recipe and --set, or start a new run"
        )


_FREE = ("run.root", "run.name", "run.log_every", "run.stall_", "data.workers", "checkpoint.", "evaluate.", "log.")


def train(launch: Launch) -> int:
    """Build everything, train, close."""
    from pipeline.train.engine import load_deepspeed_config, micro_batch_size

    set_rank_variables(os.environ)
    recipe = read_recipe(launch)
    deepspeed_config = load_deepspeed_config(launch.config)
    micro_batch_size(recipe.batch, int(os.environ["WORLD_SIZE"]))
    from pipeline.train.distributed import distributed
    from pipeline.train.sinks import check_log

    check_log(recipe.log)
    with distributed() as ranks:
        return _train(recipe, deepspeed_config, launch.resume, ranks)


def _train(recipe: Recipe, deepspeed_config: dict[str, Any], resume: str | None, ranks: Any) -> int:
    from pipeline.train.build import build_trainer
    from pipeline.train.run_dir import describe_run, open_run, set_state

    run, checkpoint = ranks.on_main(lambda: open_run(recipe, resume, say=print))
    if resume == "auto" and (run.path / "recipe.yaml").is_file():
        ranks.on_main(lambda: check_same(stored_recipe(run.path), recipe, run.path))
    try:
        trainer = build_trainer(recipe, deepspeed_config, ranks, run)
    except BaseException:
        if ranks.is_main:
            with suppress(OSError):  # it holds something: an earlier launch of this run
                run.path.rmdir()
        raise
    if checkpoint is not None:
        trainer.resume(checkpoint)
    if ranks.is_main:
        (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        describe_run(run, recipe, deepspeed_config, ranks.world_size, str(ranks.device), trainer.total_steps)
        print(_opening(trainer, resume, checkpoint), flush=True)
    try:
        trainer.fit()
    except Stopped as stopped:
        if ranks.is_main:
            set_state(run, "stopped", step=trainer.step)
            print(
                f"stopped at step {trainer.step}; saved {stopped.checkpoint.path}; go on with --resume auto", flush=True
            )
        ranks.barrier()  # a launcher that sees another rank's exit code ends the main one
        return stopped.exit_code
    except BaseException:
        if ranks.is_main:
            with suppress(OSError):  # a full disk must not hide what went wrong
                set_state(run, "failed", step=trainer.step)
        raise
    if ranks.is_main:
        set_state(run, "finished", step=trainer.step, val=trainer.last_metrics or None)
        print(_closing(trainer), flush=True)
    return 0


def _opening(trainer: Any, resume: str | None, checkpoint: Any) -> str:
    recipe, ranks = trainer.recipe, trainer.ranks
    objective = " ".join([recipe.objective.name, *(f"{k}={v}" for k, v in recipe.objective.params().items())])
    lines = [
        f"{trainer.run.path}: recipe {recipe.recipe}, objective {objective}",
        f"{trainer.data.num_pairs} pairs, {ranks.world_size} rank(s) on {ranks.device.type}, "
        f"{trainer.total_steps} steps of {recipe.batch.size} pairs ({_negatives(recipe, ranks.world_size)})",
        f"{trainer.num_training / 1e6:.2f} M parameters train, {trainer.num_frozen / 1e6:.2f} M are frozen",
    ]
    if (framework := trainer.engine.module.framework) is not None:
        lines.append(f"framework {recipe.framework.name}: {framework.describe()}")
    if (adapters := trainer.engine.module.adapters) is not None:
        lines.append(f"{recipe.adapters.name} r={recipe.adapters.r} {adapters.describe()}, merged when saved")
    if checkpoint is not None:
        lines.append(f"going on from {checkpoint.path}")
    elif resume == "auto":
        lines.append("nothing to resume: starting from the beginning")
    return "\n".join(lines)


def _negatives(recipe: Recipe, world_size: int) -> str:
    numbers = recipe.negatives(world_size)
    token = f", {numbers['token_negatives']} in the token term" if "token_negatives" in numbers else ""
    return f"{numbers['negatives']} negatives per positive{token}"


def _closing(trainer: Any) -> str:
    run = trainer.run
    return (
        f"done: {trainer.step} steps, {trainer.epoch} epochs; weights in {run.latest().path}\n"
        f"next: pipeline evaluate {run.path} {trainer.recipe.data.set}   or   pipeline export --onnx {run.path}"
    )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
