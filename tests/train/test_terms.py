"""What a recipe's loss is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.config import load_recipe
from pipeline.model.dual_encoder import Features
from pipeline.train.terms import Terms, make_terms
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, write_recipe


@pytest.mark.parametrize(
    ("overrides", "objective_over", "token_over"),
    [
        ([], "micro-batch", None),
        (["batch.negatives=global"], "micro-batch", None),  # a batch of one micro-batch needs no cache
        (["batch.accumulate=4"], "micro-batch", None),
        (["batch.accumulate=4", "batch.negatives=global"], "step", None),
        (["batch.accumulate=4", "batch.negatives=global", "token.weight=1"], "step", "micro-batch"),
        (["batch.accumulate=4", "token.weight=1", "token.scope=global"], "micro-batch", "step"),
    ],
)
def test_what_is_over_what(overrides: list[str], objective_over: str, token_over: str | None) -> None:
    terms = make_terms(load_recipe("hn", overrides), rank=0)
    assert terms.objective_over == objective_over
    assert (terms.token is None) == (token_over is None)
    assert terms.token is None or terms.token_over == token_over
    assert terms.need_cache == ("step" in (objective_over, token_over))


def test_terms_are_logged_unweighted_and_summed_weighted() -> None:
    def objective(image: object, text: object, scale: object, ids: object) -> torch.Tensor:
        return torch.tensor(2.0)

    def token(image: object, text: object, mask: object, scale: object, ids: object) -> torch.Tensor:
        return torch.tensor(3.0)

    one = torch.ones(1)
    terms = Terms(objective, token, 0.5)  # type: ignore[arg-type]
    values = terms.values(Features(one, one, one, one, one, one), one, "micro-batch", {})
    assert {name: float(value) for name, value in values.items()} == {"objective": 2.0, "token": 3.0}
    assert float(terms.total(values)) == 3.5
    assert terms.values(Features(one, one, one), one, "step", {}) == {}
    assert terms.total({}) is None


def _gammas(config: str, recipe: str) -> tuple[list[float], dict[str, object]]:
    """The margin's strength at each step of a run, and the last saturation."""
    trainer = build_on_rank(config, recipe, [])
    objective, seen = trainer.stepper.terms.objective, []
    trainer.log.step = lambda metrics: seen.append(objective.margin().live)
    batches = trainer.data.epoch(0)
    for _ in range(4):
        trainer._optimizer_step(batches)
    return seen, objective.saturation()


def test_a_schedule_of_the_objective_follows_the_steps(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    schedule = {"name": "hn", "gamma": 0.8, "gamma_start": 0.0, "gamma_schedule": "linear"}
    recipe = write_recipe(tmp_path, tiny_set, objective=schedule)
    ((seen, saturation),) = ranks(1).run(_gammas, "zero2", str(recipe))
    assert seen == pytest.approx([0.0, 0.1, 0.2, 0.3])  # of 8 steps
    assert {"zero_rows", "effective_negatives"} <= saturation.keys()


def test_a_model_without_tokens_is_refused_before_it_trains(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, token={"weight": 1.0})
    model = tmp_path / "tiny-clip.json"
    model.write_text(model.read_text().replace('"patch_size": 8', '"patch_size": 8, "attentional_pool": true'))
    with pytest.raises(ValueError, match="gives no features per token"):
        ranks(1).run(build_on_rank, "zero2", str(recipe), [])
