"""Runs and checkpoints on disk: what is there, which is newest, which is complete. Reads JSON only, no torch.

runs/<name>/
    run.json            recipe, state, times, versions
    recipe.yaml         the resolved recipe             deepspeed.json   the DeepSpeed config in force
    metrics.jsonl       one line per logged step        tensorboard/     the same as events
    evaluations/        one table per evaluation
    checkpoints/
        step-00000120/  complete or absent: written aside, hashed, renamed; its manifest tells which is newest and best
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
WEIGHTS = "open_clip_model.safetensors"  # open_clip's own names, so that its `local-dir:` finds them
MODEL_CONFIG = "open_clip_config.json"


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is not JSON; names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); was it edited or cut short?") from error


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder."""

    path: Path

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return int(self.path.name.split("-")[1])  # step-00000120, or step-00000120-2 when it was written again

    @property
    def serial(self) -> int:
        """Counts the checkpoints of a run in the order of writing, which is not that of steps if it went back once."""
        return int(read_json(self.path / MANIFEST).get("serial", 0))

    @property
    def score(self) -> float | None:
        """Validation R@1 as `checkpoint.best_by` has it, of these very weights; None where they were not evaluated."""
        score: float | None = read_json(self.path / MANIFEST).get("score")
        return score

    def is_complete(self) -> bool:
        """Whether every file of the manifest is there with its size. `check` also compares the hashes."""
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            return False
        try:
            files = {self.path / name: entry["bytes"] for name, entry in read_json(manifest)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):  # no manifest of ours: damaged, like a missing file
            return False
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def check(self) -> None:
        """Compare every file with the manifest.

        Raises:
            ValueError: a file is missing, of another size or of another hash; names it.
        """
        if not (self.path / MANIFEST).is_file():
            raise ValueError(f"{self.path} is not a complete checkpoint: it has no {MANIFEST}")
        for name, entry in read_json(self.path / MANIFEST)["files"].items():
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"checkpoint {self.path} is damaged: {name} is missing; use an older checkpoint")
            if file.stat().st_size != entry["bytes"] or sha256_of(file) != entry["sha256"]:
                raise ValueError(f"checkpoint {self.path} is damaged: {name} has changed; use an older checkpoint")


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @property
    def info(self) -> dict[str, Any]:
        """The contents of run.json."""
        info: dict[str, Any] = read_json(self.path / "run.json")
        return info

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        return sorted((c for c in self._folders() if c.is_complete()), key=lambda c: (c.serial, c.step))

    def damaged(self) -> list[Checkpoint]:
        """Those that are not complete. Saves that were cut short are none: they have other names."""
        return [c for c in self._folders() if not c.is_complete()]

    def _folders(self) -> list[Checkpoint]:
        return [Checkpoint(p) for p in sorted((self.path / "checkpoints").glob("step-*")) if p.is_dir()]

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        complete = self.checkpoints()
        return complete[-1] if complete else None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the highest validation R@1, the newest of equals; None if none was evaluated."""
        scored = [c for c in self.checkpoints() if c.score is not None]
        return max(scored, key=lambda c: (c.score, c.serial)) if scored else None


def all_runs(root: Path) -> Iterator[Run]:
    """Every run under a folder, newest first."""
    runs = [Run(p.parent) for p in root.rglob("run.json")]
    yield from sorted(runs, key=_created, reverse=True)


def _created(run: Run) -> float:
    try:
        return float(run.info["created"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run.path / 'run.json'} does not say when the run began: was it edited?") from error


def newest_run(root: Path, name: str | None = None, with_checkpoint: bool = True) -> Run | None:
    """The newest run under a folder; with a name, the newest of that recipe or in a folder of that name."""
    for run in all_runs(root):
        if name is not None and name not in (run.info["recipe"], run.path.name):
            continue
        if not with_checkpoint or run.latest() is not None:
            return run
    return None


def find_checkpoint(reference: str | None, root: Path) -> Checkpoint:
    """The checkpoint that a user means.

    Args:
        reference: a checkpoint folder, a run folder (its newest checkpoint), the same under `root`, or a bare name:
            the newest run of that recipe or in a folder of that name. None is the newest run of all. With `:best` at
            its end it is the run's best checkpoint by validation R@1.
        root: where runs are kept.

    Raises:
        ValueError: there is none; says what was looked for and how to make one.
    """
    if reference is not None and reference.endswith(_BEST):
        return _best(Run(find_checkpoint(reference.removesuffix(_BEST) or None, root).path.parent.parent))
    if reference is None:
        run = newest_run(root)
        if run is None:
            raise ValueError(f"no run with a checkpoint under {root}/; train one: {_TRAIN}")
        return _latest(run)
    if (run := newest_run(root, reference)) is not None:
        return _latest(run)
    for path in (Path(reference), root / reference):
        if (path / MANIFEST).is_file() and (path / WEIGHTS).is_file():
            return Checkpoint(path)
        if (path / "run.json").is_file():
            return _latest(Run(path))
        if path.is_dir() and (run := newest_run(path)) is not None and path != root:
            return _latest(run)
    raise ValueError(
        f"'{reference}' is neither a checkpoint, nor a run under {root}/, nor a recipe that was run; "
        f"train it first: {_TRAIN} --recipe {Path(reference).name}"
    )


_BEST = ":best"
_TRAIN = "deepspeed launcher/train.py --config zero2.json"


def _latest(run: Run) -> Checkpoint:
    checkpoint = run.latest()
    if checkpoint is None:
        raise ValueError(f"run {run.path} has no complete checkpoint yet")
    return checkpoint


def _best(run: Run) -> Checkpoint:
    checkpoint = run.best()
    if checkpoint is None:
        raise ValueError(f"run {run.path} has no checkpoint that was evaluated: see data.val_split and evaluate")
    return checkpoint
