"""Where the figures of a run go: metrics.jsonl, TensorBoard events, Weights & Biases.

Each goes on with a run that is resumed: no step is there twice, and none is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from pipeline.config import Recipe
from pipeline.metrics import METRICS, flat, parse_lines
from pipeline.training_sections import LogConfig


class Sink(Protocol):
    """One place that figures go to."""

    name: str

    def write(self, metrics: dict[str, Any]) -> None:
        """Take the figures of a step or of an evaluation. An OSError is the place's fault, not the run's."""

    def close(self) -> None:
        """All that was written is there."""


class MetricsFile:
    """metrics.jsonl: a line is there whole as soon as it is written.

    Args:
        folder: the run's.
        start_step: lines of later steps are of a launch that ended without saving them, and are dropped.
    """

    name = METRICS

    def __init__(self, folder: Path, start_step: int) -> None:
        path = folder / METRICS
        lines = path.read_bytes().splitlines() if path.is_file() else []
        kept = [line for line in parse_lines(lines) if line["step"] <= start_step]
        aside = path.with_name(f".{METRICS}.tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting = b""

    def write(self, metrics: dict[str, Any]) -> None:
        """Append a line. What a full disk refuses is kept, and written before the next one."""
        self._waiting += json.dumps(metrics).encode() + b"\n"
        try:
            written = self._file.write(self._waiting)
            if written != len(self._waiting):
                raise OSError("only a part of a line could be written")
        except OSError:
            os.truncate(self._file.fileno(), self._size)
            raise
        self._size += len(self._waiting)
        self._waiting = b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in `tensorboard/`; TensorBoard passes over what an earlier launch wrote of later steps."""

    name = "TensorBoard"

    def __init__(self, folder: Path, start_step: int) -> None:
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def write(self, metrics: dict[str, Any]) -> None:
        """Write every number under its path; flushed, for who is killed now resumes after this step."""
        for tag, value in flat(metrics).items():
            self._events.add_scalar(tag, value, metrics["step"], walltime=metrics["time"])
        self._events.flush()

    def close(self) -> None:
        """Close the event file."""
        self._events.close()


class WandB:
    """A run of Weights & Biases, the same one for all launches of a run; its id is in `wandb.json`.

    A resumed launch that comes to steps which were logged before repeats them bitwise: wandb keeps the earlier ones.

    Raises:
        ValueError: wandb cannot start; says why.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb

        identity = folder / "wandb.json"
        if not identity.is_file():
            identity.write_text(json.dumps({"id": secrets.token_hex(4)}) + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=recipe.log.wandb_project,
                name=recipe.log.wandb_name or folder.name,
                id=json.loads(identity.read_text(encoding="utf-8"))["id"],
                resume="allow",
                dir=str(folder),
                config=recipe.model_dump(mode="json"),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise ValueError(f"log.wandb: {error}; log in by `wandb login`, or set WANDB_MODE=offline") from error

    def write(self, metrics: dict[str, Any]) -> None:
        """Hand the numbers to wandb, which sends them in a process of its own."""
        with _errors_of_wandb():
            self._run.log({"epoch": metrics["epoch"], **flat(metrics)}, step=metrics["step"])

    def close(self) -> None:
        """Send the rest; a run that ends by an error is marked as failed."""
        exit_code = 0 if sys.exc_info()[0] is None else 1
        with _errors_of_wandb():
            self._run.finish(exit_code=exit_code)


@contextmanager
def _errors_of_wandb() -> Iterator[None]:
    """What a sink may raise, from what wandb raises."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise OSError(str(error)) from error


def check_log(config: LogConfig) -> None:
    """Find out before anything is built whether a run can be logged as its recipe says.

    Raises:
        ValueError: wandb is asked for and not installed.
    """
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("log.wandb needs the package wandb: pip install 'hn-clip[wandb]', or set log.wandb=false")


def open_sinks(folder: Path, start_step: int, recipe: Recipe) -> list[Sink]:
    """The places that a recipe asks for."""
    sinks: list[Sink] = [MetricsFile(folder, start_step)]
    if recipe.log.tensorboard:
        sinks.append(TensorBoard(folder, start_step))
    if recipe.log.wandb:
        sinks.append(WandB(folder, recipe))
    return sinks


def stamped(metrics: dict[str, Any]) -> dict[str, Any]:
    """With the time of now, in seconds since 1970."""
    return {**metrics, "time": time.time()}
