"""Being asked to stop, and not getting on: signals, exit codes, the watchdog, ranks that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_recipe
from pipeline.runs import Run
from pipeline.train.entry import main
from pipeline.train.stop import EXIT_STALLED, StopRequest
from pipeline.train.watchdog import Watchdog
from tests.ranks import Ranks
from tests.train.tiny import losses_of, train_on_rank, write_recipe


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_the_first_signal_is_remembered(name: str) -> None:
    number = getattr(signal, name)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = StopRequest()
        assert stop.number == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_in_evaluation(config: str, recipe: str, overrides: list[str], number: int, call: int) -> int:
    """The last rank gets a signal in its `call`-th batch of an evaluation."""
    import torch.distributed as dist

    from pipeline.evaluate.encode import TorchEncoder

    calls: list[int] = []
    original = TorchEncoder.encode_texts

    def counted(self: Any, captions: Any) -> Any:
        calls.append(1)
        if len(calls) == call and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
        return original(self, captions)

    TorchEncoder.encode_texts = counted  # type: ignore[method-assign]
    try:
        return train_on_rank(config, recipe, overrides)
    finally:
        TorchEncoder.encode_texts = original  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_evaluation_stops_between_batches_and_is_made_up_for(
    number: int, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set, evaluate={"batch_size": 4}, ema={"decay": 0.9}))
    ranks(2).run(train_on_rank, "zero3", recipe, ["run.name=whole"])
    answers = ranks(2).run(_stopped_in_evaluation, "zero3", recipe, ["run.name=cut"], number, 2)
    assert answers == [128 + number] * 2
    whole, cut = Run(tmp_path / "runs" / "whole"), Run(tmp_path / "runs" / "cut")
    (saved,) = cut.checkpoints()
    assert (saved.step, saved.score) == (4, None)
    assert not (cut.path / "evaluations").exists()
    assert ranks(2).run(train_on_rank, "zero3", recipe, ["run.name=cut"], "auto") == [0, 0]
    assert losses_of(cut.path) == losses_of(whole.path)
    tables = sorted(path.name for path in (whole.path / "evaluations").iterdir())
    assert len(tables) == 2
    for table in tables:
        assert json.loads((cut.path / "evaluations" / table).read_text()) == json.loads(
            (whole.path / "evaluations" / table).read_text()
        )


# not getting on -------------------------------------------------------------------------------------------------------

STALLED = """
import sys, threading
from pipeline.train.watchdog import Watchdog
with Watchdog(3, float(sys.argv[1]), float(sys.argv[2])) as watchdog:
    watchdog.at("waiting for its loader", 12)
    threading.Event().wait()
"""


def test_a_stalled_rank_says_where_it_is_and_ends() -> None:
    command = [sys.executable, "-c", STALLED, "0.2", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == EXIT_STALLED == 75
    said, ended, *stacks = done.stderr.splitlines()
    assert said.startswith("stalled: rank 3 is in waiting for its loader at step 12 for 0 s; ends the run after 2 s")
    assert ended == "stalled: rank 3 is in waiting for its loader at step 12 for 2 s: giving up (exit code 75)"
    assert any("most recent call first" in line for line in stacks)


def test_the_limits_of_a_stall_are_in_order() -> None:
    assert load_recipe("hn", ["run.stall_after_s=null"]).run.stall_after_s is None
    with pytest.raises(ValueError, match=r"'run': stall_exit_s 5\.0 is less than stall_after_s 10\.0"):
        load_recipe("hn", ["run.stall_after_s=10", "run.stall_exit_s=5"])


def test_a_rank_that_gets_on_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Watchdog(0, 60, 120) as watchdog:
        for step in range(100):
            watchdog.at("waiting for its loader", step)
    with Watchdog(0, None, 1) as watchdog:
        watchdog.at("evaluation", 1)
    assert capfd.readouterr().err == ""


def test_the_rank_that_lost_another_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What gloo raises when a process of the group is gone; anything else keeps its traceback."""

    def lost(launch: Any) -> int:
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41041")

    def broken(launch: Any) -> int:
        raise RuntimeError("shape mismatch")

    from pipeline.train import entry

    monkeypatch.setattr(entry, "train", lost)
    assert main(entry.Launch("zero2")) == 1
    assert "another rank is gone; its own error is above" in capsys.readouterr().err
    monkeypatch.setattr(entry, "train", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        main(entry.Launch("zero2"))
