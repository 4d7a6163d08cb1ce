"""How often a training step encodes a picture and a text, counted in real steps against the table in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.frameworks import FRAMEWORKS
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, write_recipe

TABLE = Path(__file__).parents[2] / "docs" / "frameworks.md"
ADAPTERS = ("lora", "dora")


def _stated() -> dict[str, tuple[str, str]]:
    """Our passes of images and texts by word, as the table says."""
    rows = re.findall(r"^\| ([a-z]+) \| ([^|]+) \| ([^|]+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return {word: (images, texts) for word, images, texts in rows if word != "word"}


def _count(recipe: str) -> tuple[float, float, int]:
    """Rows through the image and the text encoder per pair of one step, and K where the framework has it."""
    trainer: Any = build_on_rank("zero2", recipe, [])
    model = trainer.engine.module
    rows = {"visual": 0, "text": 0}

    def counted(tower: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            rows[tower] += len(inputs[0])

        return hook

    for tower in rows:
        getattr(model.clip, tower).register_forward_pre_hook(counted(tower))
    batches = trainer.data.epoch(0)
    trainer.engine.train()
    trainer.stepper.step(lambda: next(batches), 0, 0)
    pairs = trainer.recipe.batch.size
    crops = getattr(getattr(model.framework, "config", None), "crops", 0)
    return rows["visual"] / pairs, rows["text"] / pairs, crops


def test_the_table_has_every_word() -> None:
    assert {"plain", *FRAMEWORKS, *ADAPTERS} <= _stated().keys()


@pytest.mark.parametrize(
    ("word", "objective"), [("plain", "infonce"), *((word, "hn") for word in ("plain", *FRAMEWORKS, *ADAPTERS))]
)
def test_encoder_passes_per_pair(word: str, objective: str, ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    chosen = {"adapters": {"name": word}} if word in ADAPTERS else {"framework": {"name": word}}
    recipe = write_recipe(tmp_path, tiny_set, objective={"name": objective}, **chosen)
    ((images, texts, crops),) = ranks(1).run(_count, str(recipe))
    stated = [sum(crops if part == "K" else int(part) for part in cell.split(" + ")) for cell in _stated()[word]]
    assert [images, texts] == stated
