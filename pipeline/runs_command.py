"""`pipeline runs` and `pipeline runs show`: what is said, and how it is laid out."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from pipeline.curves import draw, panels, write_png
from pipeline.metrics import is_evaluation, read_metrics
from pipeline.runs import Run, read_json
from pipeline.runs_table import RunSummary, ago, all_summaries, find_run, read_recipe

_COLUMNS: dict[str, Literal["left", "right"]] = {
    "run": "left",
    "recipe": "left",
    "state": "left",
    "step": "right",
    "R@1 t2i/i2t": "right",
    "age": "right",
    "logged": "right",
}
_NARROW = 80  # characters: below, recipe and logged are left out
_COLOURS = {"running": "green", "finished": "blue", "stopped": "yellow", "died": "red", "failed": "red"}


def list_runs(root: Path, as_json: bool) -> None:
    """Print every run, newest first.

    Raises:
        FileNotFoundError: there is no folder of runs.
    """
    runs = all_summaries(root)
    if as_json:
        print(_strict_json([run.as_dict() for run in runs]))
        return
    if not runs:
        print(f"no runs under {root}/")
        return
    console = _console()
    narrow = console.width < _NARROW
    columns = [name for name in _COLUMNS if not (narrow and name in ("recipe", "logged"))]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name not in ("run", "recipe"), justify=_COLUMNS[name])
    for run in runs:
        cells = {
            "run": _plain(run.name),
            "recipe": _plain(run.recipe or "?"),
            "state": f"[{_COLOURS.get(run.state, 'red')}]{run.state}[/]",
            "step": _step(run),
            "R@1 t2i/i2t": _recall(run.best),
            "age": ago(run.created),
            "logged": ago(run.updated),
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)
    for run in runs:
        if run.problem:
            console.print(f"{run.name} is damaged: {run.problem}", markup=False, highlight=False, soft_wrap=True)


def show_run(name: str, root: Path, png: Path | None, as_json: bool) -> None:
    """Print what there is to know of a run, with its curves, and write these as a PNG.

    Args:
        name: as in the list, a folder, or a recipe: its newest run.
        root: where runs are kept.
        png: the picture; `curves.png` in the run when not given. With JSON there is one only if it is given.
        as_json: print the facts and all metrics as JSON.

    Raises:
        ValueError: there is no such run.
        OSError: the picture cannot be written there.
    """
    run = find_run(name, root)
    path = Path(run.path)
    lines = read_metrics(path)
    found = panels(lines)
    if as_json:
        print(_strict_json({**run.as_dict(), "recipe_values": read_recipe(path), "metrics": lines}))
    else:
        console = _console()
        facts = facts_of(run, lines)
        width = max(len(key) for key, _ in facts)
        for key, value in facts:
            console.print(f"{key:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)
        if found:
            print("\n" + draw(found, console.width, colour=console.is_terminal))
    if not found:
        if not as_json:
            print("no curves: nothing is logged yet")
    elif png is not None:
        write_png(found, f"{run.name}: {run.recipe}, {run.state}", png)
    elif not as_json:
        png = path / "curves.png"
        try:
            write_png(found, f"{run.name}: {run.recipe}, {run.state}", png)
        except OSError as error:  # somebody else's run
            print(f"no picture: {error}; say where by --png", file=sys.stderr)
            return
    if png is not None and found and not as_json:
        print(f"picture: {png}")


def facts_of(run: RunSummary, lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What a run is and how it stands, as (name, value)."""
    path = Path(run.path)
    facts = [("run", run.name), ("folder", run.path), ("recipe", run.recipe or "?"), ("state", run.state)]
    if run.problem:
        return [*facts, ("problem", run.problem)]
    facts += _setting(path)
    steps = [line for line in lines if not is_evaluation(line)]
    facts.append(("step", _step(run) + (f", epoch {steps[-1].get('epoch', '?')}" if steps else "")))
    if run.best is not None:
        facts.append(("best R@1", f"{_recall(run.best)} text to image / image to text, at step {run.best['step']}"))
    if steps:
        facts += _figures(steps[-1])
    facts.append(("checkpoints", _checkpoints(path)))
    facts.append(("created", _moment(run.created)))
    facts.append(("logged", _moment(run.updated)))
    return facts


def _setting(path: Path) -> list[tuple[str, str]]:
    """What is trained, on what, by how many."""
    info, recipe = read_json(path / "run.json"), read_recipe(path)
    facts = []
    objective, data = recipe.get("objective"), recipe.get("data")
    if isinstance(objective, dict):
        facts.append(("objective", " ".join([str(objective.get("name")), *_options(objective, "name")])))
    if isinstance(data, dict):
        facts.append(("data", f"{data.get('set')}, {data.get('train_split')}"))
    batch = recipe.get("batch")
    if isinstance(batch, dict):
        facts.append(("batch", f"{batch.get('size')} pairs, {info.get('negatives', '?')} negatives per positive"))
    facts.append(("ranks", f"{info.get('world_size', '?')} on {info.get('device', '?')}"))
    process = info.get("process")
    if isinstance(process, dict) and info["state"] == "running":
        facts.append(("process", f"{process.get('pid')} on {process.get('host')}"))
    return facts


def _figures(last: dict[str, Any]) -> list[tuple[str, str]]:
    """The last logged step."""
    facts = [("loss", f"{last.get('loss', math.nan):.4f}, logit_scale {last.get('logit_scale', math.nan):.2f}")]
    if "pairs_per_second" in last:
        tokens = f", {last['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in last else ""
        facts.append(("speed", f"{last['pairs_per_second']:.1f} img/s{tokens}"))
    shares = last.get("time_share")
    if isinstance(shares, dict):
        facts.append(("time", ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares.items())))
    memory = last.get("memory")
    if isinstance(memory, dict):
        facts.append(("memory", ", ".join(f"{n.replace('_', ' ')} {max(v):.0f} MiB" for n, v in memory.items() if v)))
    if "captions_cut" in last:
        facts.append(("captions cut", f"{last['captions_cut']:.1%}"))
    return facts


def _checkpoints(path: Path) -> str:
    run = Run(path)
    try:
        complete, best = run.checkpoints(), run.best()
    except (ValueError, OSError, KeyError, TypeError, IndexError) as error:
        return f"damaged: {error}"
    if damaged := [checkpoint.path.name for checkpoint in run.damaged()]:
        return f"damaged: {', '.join(damaged)}" + (f"; newest {complete[-1].path.name}" if complete else "")
    if not complete:
        return "none that is complete"
    return f"newest {complete[-1].path.name}" + (f", best {best.path.name}" if best is not None else "")


def _options(section: dict[str, Any], *but: str) -> list[str]:
    return [f"{key}={value}" for key, value in section.items() if key not in but]


def _step(run: RunSummary) -> str:
    if run.step is None:
        return "?"
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _recall(best: dict[str, Any] | None) -> str:
    return "-" if best is None else f"{best['t2i']:.1f}/{best['i2t']:.1f}"


def _moment(moment: float | None) -> str:
    if moment is None:
        return "?"
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(moment))}, {ago(moment)} ago"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _console() -> Console:
    """As wide as the terminal, or as COLUMNS says."""
    return Console(width=shutil.get_terminal_size((100, 24)).columns)


def _strict_json(value: Any) -> str:
    """JSON that every reader takes: numbers that are not finite are null."""

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {str(key): clean(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [clean(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(clean(value), indent=2, ensure_ascii=False)
