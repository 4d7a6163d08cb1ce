"""metrics.jsonl, read: one JSON object per line, of a logged step or of an evaluation. No torch.

A run writes its lines whole and drops those of steps that it does not go on from, so a reader sees each step once. The
last line of a run that was killed may be cut short; it is passed over, as anything that is no such object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that hold metrics of a step."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run, oldest first; none where it has logged nothing."""
    path = run / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return list(parse_lines(file))


def is_evaluation(metrics: dict[str, Any]) -> bool:
    """Whether a line tells of an evaluation; the others tell of a training step."""
    return "val" in metrics


def flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested metrics by path, `saturation/zero_rows` or `memory/rss/0`; step, epoch and time apart."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            value = dict(zip(map(str, range(len(value))), value, strict=True))
        if isinstance(value, dict):
            numbers.update(flat(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float) and (prefix or name not in ("step", "epoch", "time")):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers


def best_recall(lines: Iterable[dict[str, Any]], by: str = "mean") -> dict[str, Any] | None:
    """The evaluation with the highest R@1, the last of equals: its step, and t2i and i2t in percent.

    Args:
        lines: of metrics.jsonl.
        by: `t2i`, `i2t`, or the mean of both, as `checkpoint.best_by` has it.
    """

    def score(found: dict[str, Any]) -> float:
        return float(found[by]) if by in ("t2i", "i2t") else (found["t2i"] + found["i2t"]) / 2

    best: dict[str, Any] | None = None
    for line in lines:
        try:
            t2i, i2t = float(line["val"]["t2i"]["1"]), float(line["val"]["i2t"]["1"])
        except (KeyError, TypeError, ValueError):
            continue
        found = {"step": line["step"], "t2i": t2i, "i2t": i2t}
        if not math.isnan(t2i + i2t) and (best is None or score(found) >= score(best)):
            best = found
    return best
