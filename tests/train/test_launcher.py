"""The real DeepSpeed launcher: few tests, for it takes half a minute to start."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.runs import Run
from tests.ranks import free_port
from tests.train.tiny import write_recipe

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 400


@pytest.fixture
def port() -> int:
    return free_port()


def _launch(port: int, *arguments: str, ranks: int = 2, script: str = "launcher/train.py") -> subprocess.Popen[str]:
    """The launcher in a process group of its own, as a shell starts it; output and errors in one pipe.

    What has not ended in time is killed, so that a test that reads its output ends as well.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launched = subprocess.Popen(
        ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(port), script, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    overdue = threading.Timer(PATIENCE_S, _kill, [launched])
    overdue.daemon = True
    overdue.start()
    return launched


def _kill(launched: subprocess.Popen[str]) -> None:
    if launched.poll() is None:
        os.killpg(launched.pid, signal.SIGKILL)


def _shared_memory(port: int) -> list[str]:
    return glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*")


def test_ctrl_c_leaves_a_checkpoint_that_resume_auto_goes_on_from(port: int, tiny_set: Path, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set, schedule={"epochs": 100}))
    launched = _launch(port, "--config", "zero2.json", "--recipe", recipe)
    assert launched.stdout is not None
    lines = []
    for line in launched.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            os.killpg(launched.pid, signal.SIGINT)  # what a terminal does
    launched.wait(timeout=60)
    output = "".join(lines)
    run = Run(tmp_path / "runs" / "tiny")
    assert run.info["state"] == "stopped", output
    checkpoint = run.latest()
    assert checkpoint is not None
    assert f"saved {checkpoint.path}; go on with --resume auto" in output
    assert re.search(r"step 2/400  epoch 1  loss \d+\.\d+ .* 15 negatives  \d+\.\d img/s .* left \d:\d\d:\d\d", output)
    assert not _shared_memory(port), "buffers are unlinked once every rank has mapped them"

    resumed = _launch(port, "--config", "zero2.json", "--recipe", recipe, "--resume", "auto")
    assert resumed.stdout is not None
    for line in resumed.stdout:
        lines.append(line)
        if line.startswith(f"step {checkpoint.step + 2}/"):
            os.killpg(resumed.pid, signal.SIGKILL)
            os.system(f"pkill -9 -f {recipe}")
    resumed.wait(timeout=60)
    assert f"going on from {checkpoint.path}" in "".join(lines)
    logged = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), "every step once, the resumed launch after the first"
    assert not _shared_memory(port), "a killed run leaves nothing either"


@pytest.mark.parametrize("override", ["objective.gama=0.25"])
def test_a_wrong_override_is_one_line_and_a_non_zero_exit(
    override: str, port: int, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set))
    launched = _launch(port, "--config", "zero2.json", "--recipe", recipe, "--set", override)
    output, _ = launched.communicate()
    assert launched.returncode != 0
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "'gama'" in errors[0]
    assert "'gamma'" in errors[0]
    assert "Traceback" not in output


FAILING = """
import os, sys
sys.path.insert(0, {repository!r})
from pipeline.train.loop import Trainer
step = Trainer._optimizer_step

def step_or_fail(self, batches):
    if self.step == 2 and os.environ["RANK"] == "1":
        raise {error}("the second rank's own trouble")
    step(self, batches)

Trainer._optimizer_step = step_or_fail
from launcher.train import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("error", "own"),
    [
        ("RuntimeError", "RuntimeError: the second rank's own trouble"),
        ("OSError", "error on rank 1: the second rank's own trouble"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_own_error_on_top(
    error: str, own: str, port: int, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set, schedule={"epochs": 100}))
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(repository=str(REPOSITORY), error=error))
    launched = _launch(port, "--config", "zero2.json", "--recipe", recipe, script=str(script))
    output, _ = launched.communicate()
    assert launched.returncode != 0
    lines = [line.removeprefix("[rank1]: ") for line in output.splitlines()]  # torch says who raised
    lost = "rank 0: another rank is gone; its own error is above"
    assert [line for line in lines if line in (own, lost)] == [own, lost], output[-3000:]
    assert "step 2/400" in output
    assert "step 3/400" not in output
    assert not _shared_memory(port)
