"""From the start of a process to its first training step: python -m tests.bench.startup [--help]

`pipeline train` under ZeRO-1, and open_clip_train's `main` on synthetic data, with the same tiny model, the same batch
and no loader processes, in turns; then where our time goes. What is compiled or cached once is so before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.spans import Spans  # nothing heavy: the imports of a training are measured here

BATCH = 16
PAIRS = 2 * BATCH
_BEGAN = "BENCH_BEGAN"
_PATIENCE_S = 600
_THEIRS = (
    "import sys, open_clip; open_clip.add_model_config(sys.argv.pop(1)); "
    "from open_clip_train.main import main; main(sys.argv[1:])"
)


def until(command: list[str], sign: str) -> list[str]:
    """Run a command until a line of its output has a sign, then end it; gives the lines.

    Raises:
        RuntimeError: it ended without such a line.
    """
    env = {**os.environ, _BEGAN: str(time.time()), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    assert running.stdout is not None
    lines: list[str] = []
    try:
        for line in running.stdout:
            lines.append(line)
            if sign in line:
                return lines
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait(timeout=_PATIENCE_S)
    raise RuntimeError(f"{' '.join(command[:4])} ended without a step:\n{''.join(lines[-20:])}")


def prepare(folder: Path) -> tuple[Callable[[], object], Callable[[], object], Path]:
    """Ours and theirs, ready to be timed, and the recipe of ours."""
    from tests.bench.loader import write
    from tests.train.tiny import MODEL, write_recipe

    write(folder / "set", PAIRS)
    (folder / "set" / "mds").rename(folder / "set" / "train")
    recipe = write_recipe(folder, folder / "set", data={"val_split": None}, batch={"size": BATCH})
    config = folder / "open_clip" / "tiny-clip.json"
    config.parent.mkdir()
    config.write_text(json.dumps(MODEL["model_cfg"]))
    names = iter(range(10**6))
    pipeline = [sys.executable, "-m", "pipeline.cli", "train", "--config", "zero1.json", "--recipe", str(recipe)]
    options = {
        "model": "tiny-clip",
        "dataset-type": "synthetic",
        "train-num-samples": str(PAIRS),
        "batch-size": str(BATCH),
        "workers": "0",
        "precision": "fp32",
        "device": "cpu",
        "logs": str(folder / "logs"),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]

    def ours() -> None:
        until(pipeline, "step 1/")

    def theirs() -> None:
        name = f"run{next(names)}"  # it goes on in no run that is there
        until([sys.executable, "-c", _THEIRS, str(config), *flags, "--name", name], "Train Epoch: 0")

    return ours, theirs, recipe


def first_step(recipe: str) -> None:
    """Train to the first step in this process, and print the seconds of each part as JSON."""
    began = float(os.environ[_BEGAN])
    spans = Spans()
    started = time.time()
    from pipeline.train import build, entry
    from pipeline.train.log import RunLog
    from pipeline.train.loop import Trainer

    imported = time.time()
    import deepspeed

    from pipeline.data import TrainingData

    def said(self: RunLog, metrics: dict[str, Any]) -> None:
        total = time.time() - began
        parts = {"interpreter": started - began, "imports": imported - started, **spans.read()}
        parts["rest"] = total - sum(parts.values())
        print(json.dumps({"parts": {"total": total, **parts}}), flush=True)
        os._exit(0)

    RunLog.step = said  # type: ignore[method-assign]
    with spans.of(
        (deepspeed, "init_distributed", "join the ranks"),
        (build, "_splits", "check the set"),
        (build, "_model", "model"),
        (build, "TrainingData", "data"),
        (build, "make_engine", "engine"),
        (build, "TrainedWeights", "engine"),
        (TrainingData, "epoch", "data"),
        (Trainer, "_optimizer_step", "first step, its batch included"),
    ):
        entry.train(entry.Launch("zero1.json", recipe))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="paired starts")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one repeat")
    parser.add_argument("--first-step", metavar="RECIPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step:
        first_step(options.first_step)
        return
    from tests.bench.measure import machine, paired, spread

    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "set").mkdir()
        ours, theirs, recipe = prepare(folder)
        times = paired(ours, theirs, 1 if options.quick else options.repeats)
        print(f"to the first step: ours {str(times).strip()} open_clip_train; ratio {spread(times.ratios)}")
        command = [sys.executable, "-m", "tests.bench.startup", "--first-step", str(recipe)]
        parts = json.loads(until(command, '{"parts"')[-1])["parts"]
    print("where ours goes, s:")
    for part, seconds in parts.items():
        print(f"  {part:32} {seconds:6.2f}")


if __name__ == "__main__":
    main()
