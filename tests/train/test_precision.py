"""Every shipped DeepSpeed config trains, evaluates and goes on, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import shipped_names
from pipeline.runs import WEIGHTS, Run
from pipeline.train.checkpoint import STATE
from pipeline.train.engine import load_deepspeed_config
from tests.ranks import Ranks
from tests.train.tiny import losses_of, train_on_rank, train_recording, write_recipe, write_zero_config

FP32 = ["zero0", "zero1", "zero2", "zero2-offload", "zero3"]
BF16 = ["zero0-bf16", "zero1-bf16", "zero2-bf16", "zero3-bf16"]
FP16 = ["zero2-fp16"]  # on a GPU: tests/train/test_gpu.py


def test_these_are_all() -> None:
    assert sorted([*FP32, *BF16, *FP16]) == shipped_names("", ".json")


@pytest.mark.parametrize("name", [*FP32, *BF16, *FP16])
def test_a_config_says_what_its_name_says(name: str) -> None:
    config = load_deepspeed_config(name)
    assert config["zero_optimization"]["stage"] == int(name[4])
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == ("bf16" in name, "fp16" in name)
    assert config["bf16"].get("check_grad_overflow", True) is True
    assert ("offload_optimizer" in config["zero_optimization"]) == ("offload" in name)


@pytest.fixture(scope="module")
def reference(ranks: Ranks, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """20 losses in fp32 without ZeRO, on one rank."""
    folder = tmp_path_factory.mktemp("reference")
    recipe = write_recipe(folder, tiny_set, schedule={"epochs": 5})
    ranks(1).run(train_on_rank, "zero0", str(recipe), ["run.name=a"])
    return losses_of(folder / "runs" / "a")


@pytest.mark.parametrize("worlds", [(2,), pytest.param((1, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*FP32, *BF16])
def test_it_trains_and_evaluates(
    name: str, worlds: tuple[int, ...], reference: list[float], ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set, schedule={"epochs": 5}, evaluate={"every_epochs": 5}))
    assert len(reference) == 20
    for world in worlds:
        assert ranks(world).run(train_on_rank, name, recipe, [f"run.name=on{world}"]) == [0] * world
        run = Run(tmp_path / "runs" / f"on{world}")
        found = losses_of(run.path)
        if name in FP32:
            assert found == pytest.approx(reference, abs=1e-5)
        else:
            assert found[0] == pytest.approx(reference[0], rel=0.02)
            assert len(found) == 20
        newest = run.latest()
        assert newest is not None
        assert newest.score is not None


@pytest.mark.parametrize("optimizer", ["offload", "bf16 in fp32 sums"])
def test_other_keepers_of_masters_go_on_bitwise(optimizer: str, ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """Masters in the CPU's memory, and DeepSpeed's BF16_Optimizer, which ZeRO-1 takes with fp32 sums."""
    recipe = str(write_recipe(tmp_path, tiny_set, ema={"decay": 0.9}))
    if optimizer == "offload":
        config = "zero2-offload"
    else:
        sums = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config = str(write_zero_config(tmp_path, 1, **sums))
    ranks(2).run(train_recording, config, recipe, ["run.name=whole"])
    ranks(2).run(train_recording, config, recipe, ["run.name=cut"], None, 6)
    ranks(2).run(train_recording, config, recipe, ["run.name=cut"], "auto")
    tensors = []
    for name in ("whole", "cut"):
        newest = Run(tmp_path / "runs" / name).latest()
        assert newest is not None
        tensors.append({**load_file(newest.path / WEIGHTS), **load_file(newest.path / STATE)})
    assert tensors[0].keys() == tensors[1].keys()
    assert [n for n, t in tensors[0].items() if not torch.equal(t, tensors[1][n])] == []
