"""Going on: bitwise where nothing has changed; the same batches and losses on other ranks and ZeRO stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.runs import WEIGHTS, Run
from pipeline.train.checkpoint import STATE
from tests.ranks import Ranks
from tests.train.tiny import MODEL, losses_of, train_recording, write_recipe, write_zero_config

SIGTERM_SAVED = 143
EVERYTHING: dict[str, Any] = {
    "data": {"augment": {"crop_scale": [0.5, 1.0], "flip": 0.5}},
    "ema": {"decay": 0.9},
}


def _recipe(folder: Path, shards: Path, dropout: float = 0.0, **sections: Any) -> str:
    path = write_recipe(folder, shards, **sections)
    model = json.loads(json.dumps(MODEL))
    model["model_cfg"]["vision_cfg"]["patch_dropout"] = dropout
    (folder / "tiny-clip.json").write_text(json.dumps(model))
    return str(path)


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Encoders, raw weights, moments and step counts of the newest checkpoint."""
    checkpoint = Run(run).latest()
    assert checkpoint is not None
    return {**load_file(checkpoint.path / WEIGHTS), **load_file(checkpoint.path / STATE)}


def _assert_same(run: Path, other: Path) -> None:
    expected, got = _tensors(run), _tensors(other)
    assert got.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]
    assert different == []


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("stage", "bf16", "world"),
    [(0, False, 2), (2, False, 1), (3, False, 2), (2, True, 2)]
    + [pytest.param(*case, marks=LONG) for case in ((0, False, 1), (1, False, 2), (3, False, 1))]
    + [pytest.param(stage, True, 2, marks=LONG) for stage in (0, 1, 3)],
)
def test_bitwise_with_dropout_augmentation_and_average(
    stage: int, bf16: bool, world: int, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """Stopped in the middle of the second epoch: same pairs in the same order, losses, weights, moments, average."""
    recipe = _recipe(tmp_path, tiny_set, dropout=0.5, **EVERYTHING)
    config = str(write_zero_config(tmp_path, stage, bf16={"enabled": bf16}))
    whole = ranks(world).run(train_recording, config, recipe, ["run.name=whole"])
    first = ranks(world).run(train_recording, config, recipe, ["run.name=cut"], None, 6)
    second = ranks(world).run(train_recording, config, recipe, ["run.name=cut"], "auto")
    assert [code for code, _ in first] == [SIGTERM_SAVED] * world
    for (_, expected), (_, before), (code, after) in zip(whole, first, second, strict=True):
        assert code == 0
        assert before + after == expected
    runs = tmp_path / "runs"
    assert losses_of(runs / "cut") == losses_of(runs / "whole")
    _assert_same(runs / "whole", runs / "cut")
    assert _evaluations(runs / "cut") == _evaluations(runs / "whole")


def _evaluations(run: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in (run / "evaluations").glob("*.json")}


def _global_batches(answers: list[Any]) -> list[tuple[int, list[str], list[str]]]:
    """Sample k of a global batch lies on rank k mod W."""
    batches = []
    for parts in zip(*(seen for _, seen in answers), strict=True):
        ids = [i for row in zip(*(part[1] for part in parts), strict=True) for i in row]
        captions = [c for row in zip(*(part[2] for part in parts), strict=True) for c in row]
        batches.append((parts[0][0], ids, captions))
    return batches


@pytest.mark.parametrize(("accumulate", "negatives"), [(1, "micro"), (2, "global")])
def test_on_2_then_1_then_4_ranks(
    accumulate: int, negatives: str, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """Under another ZeRO stage each time. Augmentation is on, dropout off: it is drawn by rank."""
    batch = {"size": 16, "accumulate": accumulate, "negatives": negatives}
    recipe = _recipe(tmp_path, tiny_set, batch=batch, **EVERYTHING)
    whole = _global_batches(ranks(2).run(train_recording, "zero2", recipe, ["run.name=whole"]))
    parts = []
    for world, config, stop in ((2, "zero2", 3), (1, "zero0", 6), (4, "zero3", 0)):
        answers = ranks(world).run(train_recording, config, recipe, ["run.name=cut"], "auto", stop)
        assert {code for code, _ in answers} == {SIGTERM_SAVED if stop else 0}
        parts += _global_batches(answers)
    assert parts == whole
    runs = tmp_path / "runs"
    assert losses_of(runs / "cut") == pytest.approx(losses_of(runs / "whole"), abs=1e-5)
    expected, got = _tensors(runs / "whole"), _tensors(runs / "cut")
    # AdamW turns the zero gradient of attention's key biases into noise of the learning rate: not compared.
    for name in (n for n in expected if not n.endswith("attn.in_proj_bias")):
        torch.testing.assert_close(got[name], expected[name], atol=2e-4, rtol=1e-3, msg=name)


def test_a_checkpoint_set_and_read_again_is_the_same_at_every_stage(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """Written by two ranks at ZeRO-2, taken up and written again at once by others, bit by bit."""
    recipe = _recipe(tmp_path, tiny_set, **EVERYTHING)
    ranks(2).run(train_recording, "zero2", recipe, ["run.name=a"], None, 6)
    run = Run(tmp_path / "runs" / "a")
    newest = run.latest()
    assert newest is not None
    for world in (1, 4):
        for stage in (0, 1, 2, 3) if world == 4 else (2,):
            for state in ranks(world).run(_taken_up, f"zero{stage}", recipe, str(newest.path)):
                expected = load_file(newest.path / STATE)
                for kind, tensors in state.items():
                    for name, tensor in tensors.items():
                        stored = expected[f"{kind}/{name}"]
                        assert torch.equal(tensor, stored), (world, stage, kind, name)


def _taken_up(config: str, recipe: str, path: str) -> dict[str, dict[str, torch.Tensor]]:
    from pipeline.runs import Checkpoint
    from pipeline.train.checkpoint import load_training_state
    from tests.train.tiny import build_on_rank

    trainer = build_on_rank(config, recipe, [])
    load_training_state(trainer.weights, Checkpoint(Path(path)))
    found = trainer.weights.read()
    found.pop("ema")
    for name in trainer.weights.parameters:
        live = trainer.weights.live(name).cpu()
        assert name not in found["weight"] or torch.equal(live, found["weight"][name]), name
    return found


def test_negatives_of_one_rank_alone_need_the_same_number_of_ranks(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    batch = {"size": 16, "accumulate": 2, "negatives": "rank"}
    recipe = _recipe(tmp_path, tiny_set, batch=batch)
    ranks(2).run(train_recording, "zero2", recipe, ["run.name=a"], None, 2)
    with pytest.raises(ValueError, match="this run began on 2 ranks and goes on with --num_gpus 2 only"):
        ranks(1).run(train_recording, "zero2", recipe, ["run.name=a"], "auto")
    assert Run(tmp_path / "runs" / "a").info["state"] == "stopped"


def test_going_back_to_an_older_checkpoint_makes_the_later_ones_old(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = _recipe(tmp_path, tiny_set, checkpoint={"every_steps": 1, "keep": 9})
    ranks(1).run(train_recording, "zero2", recipe, ["run.name=a"], None, 3)
    run = Run(tmp_path / "runs" / "a")
    second = next(c for c in run.checkpoints() if c.step == 2)
    ((code, seen),) = ranks(1).run(train_recording, "zero2", None, [], str(second.path), 3)
    assert (code, [step for step, _, _ in seen]) == (SIGTERM_SAVED, [2])
    newest = run.latest()
    assert newest is not None
    assert newest.path.name == "step-00000003-2", "the step that was written before keeps its folder until then"
    assert [c.step for c in run.checkpoints()] == [1, 2, 3]
