"""The log of a run: what it holds after a kill and a resume, on a full disk, in TensorBoard and in Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.config import Recipe, load_recipe
from pipeline.metrics import flat, is_evaluation, read_metrics
from pipeline.train.log import RunLog
from pipeline.train.sinks import check_log
from tests.ranks import Ranks
from tests.train.tiny import train_on_rank, write_recipe


def recipe(folder: Path, **log: Any) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    return load_recipe(str(write_recipe(folder, folder / "no-shards", log=log)))


def step(number: int, launch: int = 1) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": 1,
        "loss": number + launch / 10,
        "logit_scale": 14.3,
        "lr": 1e-3,
        "lr_groups": [1e-3, 1e-4],
        "grad_norm": None,
        "negatives": 15,
        "saturation": {"zero_rows": 0.25, "dtype": "float32/float32"},
        "pairs_per_second": 100.0,
        "time_share": {"data": 0.1, "objective": 0.2, "communication": 0.3},
        "memory": {"rss": [800.0, 801.0]},
    }


def evaluation(number: int) -> dict[str, Any]:
    recall = {"1": 12.5, "5": 25.0, "10": 50.0}
    return {"step": number, "epoch": 1, "negatives": 15, "images": 24, "t2i": recall, "i2t": recall}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    """Killed at step 6 in the midst of a line, after the evaluation of step 4, and resumed from the save of step 4."""
    killed = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe"))
    for number in range(1, 7):
        killed.step(step(number))
        if number == 4:
            killed.evaluation(evaluation(4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "epo')  # and it is never closed
    resumed = RunLog(tmp_path, 8, 4, recipe(tmp_path / "recipe"))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 4]
    resumed.evaluation(evaluation(4))  # the save was before the evaluation
    for number in range(5, 9):
        resumed.step(step(number, launch=2))
    resumed.close()
    lines = read_metrics(tmp_path)
    losses = [(line["step"], line["loss"]) for line in lines if not is_evaluation(line)]
    assert losses == [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.1), (5, 5.2), (6, 6.2), (7, 7.2), (8, 8.2)]
    assert [line["step"] for line in lines if is_evaluation(line)] == [4]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 9
    assert scalars(tmp_path, "loss") == [(n, pytest.approx(loss)) for n, loss in losses]
    assert scalars(tmp_path, "val/t2i/1") == [(4, 12.5)]


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe", tensorboard=False))
    first.step(step(3))
    first.evaluation(evaluation(3))
    first.close()
    again = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe", tensorboard=False))
    again.step(step(1))
    again.evaluation(evaluation(3))
    again.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    assert not (tmp_path / "tensorboard").exists()


def test_figures_are_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    """A SIGKILL must not take what TensorBoard keeps back for two minutes: the resumed run never logs it again."""
    log = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe"))
    log.step(step(1))
    assert scalars(tmp_path, "loss") == [(1, pytest.approx(1.1))]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    log.close()


def test_nested_figures_become_paths() -> None:
    assert flat({**step(3), "time": 17.5}) == {
        "loss": 3.1,
        "logit_scale": 14.3,
        "lr": 1e-3,
        "lr_groups/0": 1e-3,
        "lr_groups/1": 1e-4,
        "negatives": 15.0,
        "saturation/zero_rows": 0.25,
        "pairs_per_second": 100.0,
        "time_share/data": 0.1,
        "time_share/objective": 0.2,
        "time_share/communication": 0.3,
        "memory/rss/0": 800.0,
        "memory/rss/1": 801.0,
    }
    assert flat({"time_share": {"data": 0.5}, "epoch": 1, "val": {"t2i": {"1": 3}}}) == {
        "time_share/data": 0.5,
        "val/t2i/1": 3.0,
    }


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk: a write takes what still fits, and the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_no_line_and_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe", tensorboard=False))
    log.step(step(1))
    size = path.stat().st_size
    with files_of_at_most(size + 100):
        log.step(step(2))
        assert path.stat().st_size == size, "no half line"
        log.step(step(3))
    log.step(step(4))
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.count("warning: metrics.jsonl cannot be written") == 1
    assert said.count("metrics.jsonl can be written again") == 1


def test_events_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread that writes events dies of it
    log = RunLog(tmp_path, 8, 0, recipe(tmp_path / "recipe"))
    with files_of_at_most(0):
        log.step(step(1))
    log.step(step(2))
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert capsys.readouterr().out.count("warning: TensorBoard cannot be written") == 1


# Weights & Biases -----------------------------------------------------------------------------------------------------


def history(path: Path) -> list[dict[str, float]]:
    """The rows of an offline run. Its file is a log as LevelDB's: before a record, 4 bytes, its size and its kind."""
    from wandb.proto import wandb_internal_pb2

    data, place, rows = path.read_bytes(), 7, []
    while place < len(data):
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        assert kind == 1, "records that are spread over blocks are not read here"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[place + 7 : place + 7 + size])
        place += 7 + size
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append(items)
    return rows


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for place in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place.lower()))
    asked = recipe(tmp_path / "recipe", wandb=True, tensorboard=False, wandb_project="dense-captions")
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    launches = []
    for start in (0, 2):
        log = RunLog(run, 4, start, asked)
        for number in (start + 1, start + 2):
            log.step(step(number))
        log.evaluation(evaluation(start + 2))
        second = int(time.time())
        log.close()
        wandb.teardown()  # its process writes the file, and may do so after `finish`: wait for its end
        (file,) = set(run.glob("wandb/offline-run-*/*.wandb")) - set(launches)
        launches.append(file)
        while int(time.time()) == second:  # wandb names a folder by the second, which no real launch shares
            time.sleep(0.05)
        rows = history(file)
        assert [(row["_step"], row["loss"]) for row in rows] == [(start + 1, start + 1.1), (start + 2, start + 2.1)]
        assert rows[-1]["val/t2i/1"] == 12.5, "in the row of its step"
        assert rows[0]["saturation/zero_rows"] == 0.25
    assert launches[0].name == launches[1].name, "one run, whose launches wandb puts together by its id"
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 2, 3, 4, 4]


def test_wandb_that_is_missing_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_log(recipe(tmp_path / "off").log)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else found(name, *a))
    with pytest.raises(ValueError, match=r"log\.wandb needs the package wandb: pip install 'hn-clip\[wandb\]'"):
        check_log(recipe(tmp_path / "on", wandb=True).log)
    check_log(recipe(tmp_path / "off").log)


# a whole run ----------------------------------------------------------------------------------------------------------


def test_a_run_logs_all_there_is_to_see(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        tiny_set,
        batch={"size": 32, "accumulate": 2, "negatives": "global"},
        token={"weight": 0.5, "scope": "micro"},
        optimizer={"lr": 1e-3, "lr_overrides": {"visual.*": 1e-4}},
        schedule={"epochs": 2, "warmup_steps": 2},
    )
    ranks(2).run(train_on_rank, "zero2", str(path), ["run.name=a"])
    run = tmp_path / "runs" / "a"
    lines = [line for line in read_metrics(run) if not is_evaluation(line)]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        factor = line["step"] / 2 if line["step"] < 3 else 0.5 * (1 + math.cos(math.pi * (line["step"] - 3) / 2))
        assert line["lr"] == pytest.approx(1e-3 * factor)
        assert sorted({round(lr, 9) for lr in line["lr_groups"]}) == [round(lr * factor, 9) for lr in (1e-4, 1e-3)]
        assert line["loss"] == pytest.approx(line["objective"] + 0.5 * line["token"])
        assert (line["negatives"], line["token_negatives"]) == (31, 15)
        assert line["grad_norm"] > 0
        assert 0 < line["time_share"]["objective"] < 1
        assert 0 < line["time_share"]["communication"] < 1
        assert 0 <= line["time_share"]["data"] <= line["time_share"]["data_slowest"] < 1
        assert len(line["memory"]["rss"]) == 2
        assert 2 <= line["tokens_per_second"] / line["pairs_per_second"] <= 24, "the context"
        assert 0 <= line["captions_cut"] < 1
        assert 0 <= line["saturation"]["zero_rows"] <= 1
    tags = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"]
    assert set(flat(lines[0])) <= set(tags)
    info = json.loads((run / "run.json").read_text())
    assert info["total_steps"] == 4
    assert set(info["process"]) == {"host", "pid", "began"}
