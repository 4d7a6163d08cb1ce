"""Making a run's folder, or finding the one to go on with."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.config import Recipe
from pipeline.liveness import is_here, this_process
from pipeline.runs import Checkpoint, Run, find_checkpoint, newest_run, read_json, write_json

_VERSIONS = ("torch", "deepspeed", "open_clip_torch", "mosaicml-streaming", "transformers", "timm", "numpy", "pillow")


def open_run(recipe: Recipe, resume: str | None, say: Callable[[str], object] = print) -> tuple[Run, Checkpoint | None]:
    """The run's folder, and the checkpoint to go on from if there is one.

    Args:
        recipe: `run.name` is the folder under `run.root`; without one it is the recipe's name, numbered.
        resume: None starts a new run; `auto` goes on with the newest unfinished run of this recipe (of this name, when
            it has one) from its newest checkpoint that is whole, and starts a new one when there is none; anything
            else is a run or checkpoint that must exist.
        say: told which damaged checkpoints `auto` passed over.

    Raises:
        ValueError: the named run exists and `resume` is None, or what should be resumed is not there, damaged or still
            running.
    """
    root = Path(recipe.run.root)
    if resume is None:
        return _new_run(recipe, root), None
    if resume != "auto":
        checkpoint = find_checkpoint(resume, root)
        checkpoint.check()
        named = Run(checkpoint.path.parent.parent)
        _refuse_if_running(named)
        return named, checkpoint
    run = Run(root / recipe.run.name) if recipe.run.name else newest_run(root, recipe.recipe, with_checkpoint=False)
    if run is None or not (run.path / "run.json").is_file():
        return _new_run(recipe, root), None
    if run.info["state"] == "finished" and recipe.run.name is None:
        return _new_run(recipe, root), None
    _refuse_if_running(run)
    return run, _newest_whole(run, say)


def _refuse_if_running(run: Run) -> None:
    """Two launches must not write one folder. Of a process on another host nothing is known."""
    process = run.info.get("process", {})
    if run.info["state"] == "running" and is_here(process) and process["pid"] != os.getpid():
        raise ValueError(f"{run.path} is still running, as process {process['pid']}: stop it, or start a new run")


def _newest_whole(run: Run, say: Callable[[str], object]) -> Checkpoint | None:
    """The newest checkpoint whose files are what its manifest says."""
    for checkpoint in reversed(run.checkpoints()):
        try:
            checkpoint.check()
        except ValueError as error:
            say(f"warning: {error}")
            continue
        return checkpoint
    return None


def describe_run(
    run: Run, recipe: Recipe, deepspeed_config: dict[str, Any], world_size: int, device: str, total_steps: int
) -> None:
    """Write what makes the run reproducible, and by which process it can be told whether it is still running."""
    (run.path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    write_json(run.path / "deepspeed.json", deepspeed_config)
    created = run.info["created"] if (run.path / "run.json").is_file() else time.time()
    write_json(
        run.path / "run.json",
        {
            "recipe": recipe.recipe,
            "created": created,
            "state": "running",
            "total_steps": total_steps,
            "process": this_process(),
            "world_size": world_size,
            **recipe.negatives(world_size),
            "device": device,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": _versions(),
        },
    )


def set_state(run: Run, state: str, **more: Any) -> None:
    """Note how the run stands: running, finished, stopped, failed."""
    write_json(run.path / "run.json", {**read_json(run.path / "run.json"), "state": state, **more})


def _new_run(recipe: Recipe, root: Path) -> Run:
    if recipe.run.name is not None:
        path = root / recipe.run.name
        if (path / "run.json").exists():
            raise ValueError(
                f"{path} already holds a run: go on with it by --resume auto, or choose another --set run.name=..."
            )
        return Run(path)
    path, number = root / recipe.recipe, 1
    while True:
        try:
            path.mkdir(parents=True)  # the folder itself decides between two launches at once
            return Run(path)
        except FileExistsError:
            number += 1
            path = root / f"{recipe.recipe}-{number}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
