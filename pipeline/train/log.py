"""What a run says while it trains: metrics.jsonl, TensorBoard events, and a bar or plain lines."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


class RunLog:
    """The log of one run; other ranks than the main one have a `SilentLog`.

    Args:
        folder: the run's.
        total_steps: optimizer steps of the whole run.
        start_step: steps done before this launch; later lines of an earlier launch are dropped.
    """

    def __init__(self, folder: Path, total_steps: int, start_step: int) -> None:
        self._path = folder / "metrics.jsonl"
        _drop_lines_after(self._path, start_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
        self._total = total_steps
        self._start = start_step
        self._began = time.monotonic()
        self._recall = ""
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, text="")

    def say(self, line: str) -> None:
        """A line for the reader."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def step(self, metrics: dict[str, Any]) -> None:
        """A logged optimizer step; `metrics` has at least step, epoch, loss, pairs_per_second and negatives."""
        self._write(metrics)
        if self._bar is not None:  # what fits into 80 columns
            text = f"loss {metrics['loss']:.3f} {metrics['pairs_per_second']:.0f} img/s{self._recall}"
            self._bar.update(self._task, completed=metrics["step"], text=text)
            return
        terms = f" (token {metrics['token']:.4f})" if "token" in metrics else ""
        norm = "unknown" if metrics["grad_norm"] is None else f"{metrics['grad_norm']:.3g}"
        print(
            f"step {metrics['step']}/{self._total}  epoch {metrics['epoch']}  loss {metrics['loss']:.4f}{terms}  "
            f"s {metrics['logit_scale']:.1f}  lr {metrics['lr']:.2e}  grad {norm}  "
            f"{metrics['negatives']} negatives  {metrics['pairs_per_second']:.1f} img/s  "
            f"data {metrics['data_wait']:.0%}{self._recall}  left {self._time_left(metrics['step'])}",
            flush=True,
        )

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Retrieval on the validation split after an epoch."""
        t2i, i2t = metrics["t2i"], metrics["i2t"]
        self._recall = f" R@1 {t2i['1']:.1f}/{i2t['1']:.1f}"
        self._write({**{k: metrics[k] for k in ("step", "epoch", "negatives")}, "val": {"t2i": t2i, "i2t": i2t}})
        self.say(
            f"epoch {metrics['epoch']}, {metrics['negatives']} negatives: "
            f"validation on {metrics['images']} pairs, text-to-image / image-to-text "
            + "  ".join(f"R@{k} {t2i[k]:.2f}/{i2t[k]:.2f}" for k in ("1", "5", "10"))
        )

    def close(self) -> None:
        """Flush and leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._events.close()

    def _write(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps({**metrics, "time": time.time()}) + "\n")
        self._file.flush()
        for name, value in _flat(metrics):
            self._events.add_scalar(name, value, metrics["step"])

    def _time_left(self, step: int) -> str:
        seconds = (time.monotonic() - self._began) / max(1, step - self._start) * (self._total - step)
        hours, rest = divmod(math.ceil(seconds), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"


class SilentLog:
    """The log of a rank that writes nothing."""

    def say(self, line: str) -> None: ...

    def step(self, metrics: dict[str, Any]) -> None: ...

    def evaluation(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _flat(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Nested numbers as TensorBoard tags."""
    flat = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "epoch"):
            flat.append((f"{prefix}{name}", float(value)))
    return flat


def _drop_lines_after(path: Path, step: int) -> None:
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
