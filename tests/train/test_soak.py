"""A long run that is killed over and over ends with the weights of one that is not, in memory that does not grow.

SOAK_STEPS and SOAK_KILL_EVERY shorten it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.runs import WEIGHTS, Run
from pipeline.train.checkpoint import STATE
from tests.ranks import free_port
from tests.train.tiny import losses_of, write_recipe

STEPS = int(os.environ.get("SOAK_STEPS", "2000"))
KILL_EVERY = int(os.environ.get("SOAK_KILL_EVERY", "150"))
STEPS_PER_EPOCH = 32  # 64 pairs, two at a time
WORLD = 2
PATIENCE_S = 600


def _start(recipe: str, name: str, log: Path) -> list[subprocess.Popen[bytes]]:
    """Two ranks, each in a process group of its own with its loader's processes."""
    port = free_port()
    command = [sys.executable, "-m", "pipeline.cli", "train", "--config", "zero2", "--recipe", recipe]
    command += ["--set", f"run.name={name}", "--resume", "auto"]
    started = []
    with log.open("ab") as file:
        for rank in range(WORLD):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
            environment = {**os.environ, **{k: str(v) for k, v in places.items()}, "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True))
    return started


def _steps(run: Path) -> list[dict[str, Any]]:
    if not (run / "metrics.jsonl").is_file():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(_parsed, lines) if "loss" in line]


def _parsed(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # of a line that is being written
        return {}
    return found


def _run_until(recipe: str, run: Path, step: int, log: Path) -> bool:
    """Train until a step is logged, then kill all processes at once; whether the run came to its end before."""
    ranks = _start(recipe, run.name, log)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while any(rank.poll() is None for rank in ranks):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            steps = _steps(run)
            if steps and steps[-1]["step"] >= step:
                return False
            time.sleep(0.2)
        assert [rank.wait() for rank in ranks] == [0] * WORLD, log.read_text()[-3000:]
        return True
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@pytest.mark.long
def test_killed_every_150_steps(tiny_set: Path, tmp_path: Path) -> None:
    epochs = max(1, round(STEPS / STEPS_PER_EPOCH))
    total = epochs * STEPS_PER_EPOCH
    recipe = str(
        write_recipe(
            tmp_path,
            tiny_set,
            data={"workers": 1, "augment": {"crop_scale": [0.5, 1.0]}},
            batch={"size": 2},
            optimizer={"lr": 1e-4},
            schedule={"epochs": epochs},
            evaluate={"every_epochs": max(1, epochs // 4)},
            checkpoint={"every_steps": 50},
            ema={"decay": 0.99},
        )
    )
    whole, cut = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut"
    assert _run_until(recipe, whole, 10 * total, tmp_path / "whole.log")
    kills = 0
    while not _run_until(recipe, cut, (kills + 1) * KILL_EVERY, tmp_path / "cut.log"):
        kills += 1
    assert kills >= total // KILL_EVERY - 1
    assert losses_of(cut) == losses_of(whole)
    tensors = []
    for run in (whole, cut):
        newest = Run(run).latest()
        assert newest is not None
        assert newest.step == total
        tensors.append({**load_file(newest.path / WEIGHTS), **load_file(newest.path / STATE)})
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])] == []
    _check_memory(_steps(whole))


def _check_memory(steps: list[dict[str, Any]]) -> None:
    """The last quarter of a run needs what its second quarter needed, in every process."""
    quarter = len(steps) // 4
    for kind in ("rss", "workers"):
        for rank in range(WORLD):
            sizes = [step["memory"][kind][rank] for step in steps]
            early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
            print(f"{kind} of rank {rank}: {early:.0f} then {late:.0f} MiB")
            assert late < 1.05 * early + 8, (kind, rank)
