"""Runs as `pipeline runs` lists them. Reads JSON and YAML only; what is damaged is listed as that. No torch."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.liveness import is_gone
from pipeline.metrics import METRICS, best_recall, read_metrics
from pipeline.runs import read_json

_MARKS = ("run.json", "recipe.yaml", METRICS, "checkpoints")
_STATES = ("running", "stopped", "failed", "finished")


@dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        name: its folder, under where runs are kept.
        path: its folder.
        recipe: the recipe's name.
        state: running, stopped, failed, finished; died: it says running and its process is gone; damaged.
        step, total_steps: optimizer steps logged, and of the whole run.
        best: step, t2i and i2t (R@1 in percent) of the best evaluation by `checkpoint.best_by`.
        created, updated: seconds since 1970; updated is the last thing that it logged.
        problem: what is damaged.
    """

    name: str
    path: str
    recipe: str | None = None
    state: str = "damaged"
    step: int | None = None
    total_steps: int | None = None
    best: dict[str, Any] | None = None
    created: float | None = None
    updated: float | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def run_folders(root: Path) -> Iterator[Path]:
    """Every folder under `root` that is a run, or was one: a run lies in no other run."""
    for folder, below, files in os.walk(root):
        if any(mark in files or mark in below for mark in _MARKS):
            below.clear()
            yield Path(folder)


def summarize(path: Path, root: Path) -> RunSummary:
    """A run in one line, whatever state its files are in."""
    name = os.path.relpath(path, root) if path.is_relative_to(root) else str(path)
    updated = _changed(path / METRICS) or _changed(path / "run.json")
    try:
        info = read_json(path / "run.json")
        if not isinstance(info, dict):
            raise ValueError(f"{path / 'run.json'} holds no run")
        created, recipe, state = float(info["created"]), str(info["recipe"]), info["state"]
        if state not in _STATES:
            raise ValueError(f"{path / 'run.json'} knows no state '{state}'")
        lines = read_metrics(path)
    except FileNotFoundError:
        return RunSummary(name, str(path), updated=updated, problem="it has no run.json")
    except (KeyError, TypeError) as error:
        return RunSummary(name, str(path), updated=updated, problem=f"run.json has no usable {error}")
    except (ValueError, OSError) as error:
        return RunSummary(name, str(path), updated=updated, problem=str(error))
    return RunSummary(
        name,
        str(path),
        recipe,
        "died" if state == "running" and is_gone(info.get("process")) else state,
        lines[-1]["step"] if lines else 0,
        info.get("total_steps"),
        best_recall(lines, _best_by(path)),
        created,
        updated,
    )


def all_summaries(root: Path) -> list[RunSummary]:
    """Every run under a folder, newest first, those without a date last.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}/ with runs: train one, or say where they are by --runs")
    found = [summarize(path, root) for path in run_folders(root)]
    return sorted(found, key=lambda run: run.created or 0.0, reverse=True)


def find_run(name: str, root: Path) -> RunSummary:
    """The run that a user means: its name in the list, its folder, or the newest of that recipe or folder's name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    runs = all_summaries(root) if root.is_dir() else []
    matches = [run for run in runs if run.name == name]
    if not matches and Path(name).is_dir() and list(run_folders(Path(name)))[:1] == [Path(name)]:
        matches = [summarize(Path(name), root)]
    matches = matches or [run for run in runs if name in (run.recipe, Path(run.path).name)]
    if matches:
        return matches[0]
    near = difflib.get_close_matches(name, [run.name for run in runs], n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ": see `pipeline runs`"
    raise ValueError(f"no run '{name}' under {root}/{hint}")


def ago(moment: float | None, now: float | None = None) -> str:
    """How long ago, in one unit."""
    if moment is None:
        return "?"
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def read_recipe(run: Path) -> dict[str, Any]:
    """The resolved recipe of a run as plain values; empty where it cannot be read."""
    try:
        values = yaml.load((run / "recipe.yaml").read_text(encoding="utf-8"), _LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _best_by(run: Path) -> str:
    section = read_recipe(run).get("checkpoint")
    return str(section.get("best_by", "mean")) if isinstance(section, dict) else "mean"


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
