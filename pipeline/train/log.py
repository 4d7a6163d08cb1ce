"""What a run says while it trains: figures to its sinks, and a bar or plain lines to the reader."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.config import Recipe
from pipeline.metrics import is_evaluation, read_metrics
from pipeline.train.sinks import Sink, open_sinks, stamped


class RunLog:
    """The log of one run; other ranks than the main one have a `SilentLog`.

    Args:
        folder: the run's.
        total_steps: optimizer steps of the whole run.
        start_step: steps done before this launch; figures of later ones, of an earlier launch, are dropped.
        recipe: says where the figures go.
    """

    def __init__(self, folder: Path, total_steps: int, start_step: int, recipe: Recipe) -> None:
        self._sinks = open_sinks(folder, start_step, recipe)
        self._failing: set[str] = set()
        self._evaluated = {line["step"] for line in read_metrics(folder) if is_evaluation(line)}
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
        """A logged optimizer step; `metrics` has the terms of the loss and what `Meter.read` gives."""
        self._write(metrics)
        if self._bar is not None:  # what fits into 80 columns
            text = f"loss {metrics['loss']:.3f} {metrics['pairs_per_second']:.0f} img/s{self._recall}"
            self._bar.update(self._task, completed=metrics["step"], text=text)
            return
        terms = f" (token {metrics['token']:.4f})" if "token" in metrics else ""
        norm = "unknown" if metrics["grad_norm"] is None else f"{metrics['grad_norm']:.3g}"
        shares = metrics["time_share"]
        print(
            f"step {metrics['step']}/{self._total}  epoch {metrics['epoch']}  loss {metrics['loss']:.4f}{terms}  "
            f"s {metrics['logit_scale']:.1f}  lr {metrics['lr']:.2e}  grad {norm}  "
            f"{metrics['negatives']} negatives  {metrics['pairs_per_second']:.1f} img/s  "
            f"data {shares['data']:.0%} loss {shares['objective']:.0%} comm {shares['communication']:.0%}"
            f"{self._recall}  left {self._time_left(metrics['step'])}",
            flush=True,
        )

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Retrieval on the validation split after an epoch."""
        t2i, i2t = metrics["t2i"], metrics["i2t"]
        self._recall = f" R@1 {t2i['1']:.1f}/{i2t['1']:.1f}"
        # A run that was killed between an evaluation and the save after it comes to the same evaluation again.
        if metrics["step"] not in self._evaluated:
            self._evaluated.add(metrics["step"])
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
        for sink in self._sinks:
            self._attempt(sink, sink.close)

    def _write(self, metrics: dict[str, Any]) -> None:
        line = stamped(metrics)
        for sink in self._sinks:
            self._attempt(sink, lambda sink=sink: sink.write(line))

    def _attempt(self, sink: Sink, action: Any) -> None:
        """A log that fails does not end a run: it is said when it begins to, and when it works again."""
        try:
            action()
        except OSError as error:
            if sink.name not in self._failing:
                self.say(f"warning: {sink.name} cannot be written ({error}); the run goes on")
            self._failing.add(sink.name)
        else:
            if sink.name in self._failing:
                self._failing.remove(sink.name)
                self.say(f"{sink.name} can be written again")

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
