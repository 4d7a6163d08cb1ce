"""Samples that cannot be read, and losses and gradients that are not finite."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming import MDSWriter

from pipeline.runs import Run
from pipeline.train.distributed import distributed
from shards.mds import COLUMNS
from shards.reader import ShardReader
from tests.ranks import Ranks
from tests.train.tiny import (
    build_on_rank,
    losses_of,
    train_and_hear,
    train_on_rank,
    train_recording,
    write_recipe,
    write_zero_config,
)


@pytest.fixture
def damaged_set(tiny_set: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """The tiny set with two training pictures that do not decode, though every hash is right; and their ids."""
    folder = tmp_path / "damaged"
    reader = ShardReader(tiny_set / "train")
    bad = []
    with MDSWriter(out=str(folder / "train"), columns=COLUMNS) as writer:
        for number in range(len(reader)):
            sample = dict(reader[number])
            if number in (5, 40):
                bad.append(sample["id"])
                sample["image"] = sample["image"][:100]
            writer.write(sample)
    return folder, bad


def test_bad_samples_are_replaced_alike_on_any_number_of_ranks_and_counted(
    damaged_set: tuple[Path, list[str]], ranks: Ranks, tmp_path: Path
) -> None:
    folder, bad = damaged_set
    recipe = str(write_recipe(tmp_path, folder, data={"val_split": None}))
    reader = ShardReader(folder / "train")
    order = [reader[i]["id"] for i in range(len(reader))]
    seen = {}
    for world in (1, 2):
        answers = ranks(world).run(train_recording, "zero2", recipe, [f"run.name=on{world}"])
        assert {code for code, _ in answers} == {0}
        rows = zip(*(part for _, part in answers), strict=True)
        seen[world] = [[i for row in zip(*(one[1] for one in parts), strict=True) for i in row] for parts in rows]
    assert seen[1] == seen[2]
    first_epoch = [i for batch in seen[1][:4] for i in batch]
    assert sorted([*first_epoch, *bad]) == sorted([*order, order[6], order[41]])
    newest = Run(tmp_path / "runs" / "on2").latest()
    assert newest is not None
    assert json.loads((newest.path / "manifest.json").read_text())["bad_samples"] == sorted(bad)


def test_bad_samples_are_said_once(damaged_set: tuple[Path, list[str]], ranks: Ranks, tmp_path: Path) -> None:
    folder, bad = damaged_set
    recipe = str(write_recipe(tmp_path, folder, data={"val_split": None}))
    (code, said), (other_code, nothing) = ranks(2).run(train_and_hear, "zero2", recipe, ["run.name=a"])
    assert (code, other_code, nothing) == (0, 0, [])
    warnings = [line for line in said if "cannot be read and had the next sample in its place" in line]
    assert sum(line.count(name) for line in warnings for name in bad) == 2
    assert warnings[-1].endswith("2 so far, the run stops above 10 (data.max_bad_samples)")


def test_too_many_bad_samples_stop_the_run_with_their_ids(
    damaged_set: tuple[Path, list[str]], ranks: Ranks, tmp_path: Path
) -> None:
    folder, bad = damaged_set
    recipe = str(write_recipe(tmp_path, folder, data={"val_split": None, "max_bad_samples": 1}))
    with pytest.raises(ValueError, match=r"2 samples cannot be read, more than data\.max_bad_samples=1") as raised:
        ranks(2).run(train_on_rank, "zero2", recipe, ["run.name=a"])
    assert all(name in str(raised.value) for name in bad)


def _poisoned_step(config: str, recipe: str) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The error of a step whose loss is finite and whose gradient is not, and the weights before and after."""
    from pipeline.train.step import NonFiniteError

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * float("nan")

    trainer = build_on_rank(config, recipe, [])
    objective = trainer.stepper.terms.objective

    def poisoned(image: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return objective(Poison.apply(image), *rest, **more)

    trainer.stepper.terms.objective = poisoned
    before = trainer.weights.read()["weight"]
    batches = trainer.data.epoch(0)
    try:
        trainer.stepper.step(lambda: next(batches), 0, 0)
    except NonFiniteError as error:
        return f"{error.what}: {len(error.ids)} ids", before, trainer.weights.read()["weight"]
    raise AssertionError("the step was taken")


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_move(
    stage: int, bf16: bool, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_set)
    config = write_zero_config(tmp_path, stage, bf16={"enabled": bf16})
    for number, (said, before, after) in enumerate(ranks(2).run(_poisoned_step, str(config), str(recipe))):
        assert said == "gradient norm: 8 ids"
        assert (len(before) > 0) == (number == 0)
        for name, weight in before.items():
            assert torch.equal(after[name], weight), name


def test_what_is_written_down_of_a_loss_that_is_not_finite(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, optimizer={"lr": 1e30}, schedule={"epochs": 1, "warmup_steps": 0})
    config = write_zero_config(tmp_path, 2, gradient_clipping=0.0)
    with pytest.raises(ValueError, match=r"the loss is nan at step 2"):
        ranks(2).run(train_on_rank, str(config), str(recipe), ["run.name=a"])
    dump = json.loads((tmp_path / "runs/a/nonfinite.json").read_text())
    assert dump["loss"] == "nan"
    assert [len(ids) for ids in dump["ids_by_rank"]] == [8, 8]
    assert Run(tmp_path / "runs/a").info["state"] == "failed"
    assert len(losses_of(tmp_path / "runs/a")) == 1
    assert dump["grad_norm_before"] > 0
    assert max(dump["weight_norms"].values()) > 1e29


def _train_with_a_full_disk_at_evaluations(config: str, recipe: str) -> tuple[int | str, list[str]]:
    from pipeline.train import loop

    def refuse(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write, loop.write_json = loop.write_json, refuse
    try:
        return train_and_hear(config, recipe, ["run.name=a"])
    finally:
        loop.write_json = write


def test_a_table_of_an_evaluation_that_cannot_be_written_ends_nothing(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    (code, said), (other, _) = ranks(2).run(_train_with_a_full_disk_at_evaluations, "zero2", str(recipe))
    assert (code, other) == (0, 0)
    assert [line for line in said if "val-step-00000004.json cannot be written ([Errno 28]" in line]
    assert Run(tmp_path / "runs" / "a").info["state"] == "finished"


def _refuse_on_main() -> str:
    with distributed() as ranks:
        try:
            ranks.on_main(lambda: [][0])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_any_error_of_the_main_rank_reaches_the_others(ranks: Ranks) -> None:
    expected = ["IndexError: list index out of range", "RuntimeError: on rank 0: IndexError: list index out of range"]
    assert ranks(2).run(_refuse_on_main) == expected
