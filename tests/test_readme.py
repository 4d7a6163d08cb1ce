"""What the README says is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config import load_recipe
from pipeline.objective.registry import OBJECTIVES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.strip().split("#")[0] for line in README.splitlines() if line.startswith("    pipeline ")]


def test_the_recipe_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    recipe = load_recipe(str(tmp_path / "mine.yaml"), ["objective.gamma=0.25"])
    assert recipe.objective.params() == {"gamma": 0.25}
    assert (recipe.batch.size, recipe.model.trainable) == (128, ["*"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_known(command: str) -> None:
    """Up to the arguments: --help is asked in place of doing the work."""
    words = shlex.split(command)[1:]
    path = words[:2] if words[0] == "shards" else words[:1]
    shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    for option in (word for word in words if word.startswith("--")):
        assert option in shown.output


def test_the_objectives_are_those_of_the_registry() -> None:
    (sentence,) = re.findall(r"The objective is one word: (.*?)\n?\)\.", README, re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", sentence)) == set(OBJECTIVES)


def test_every_linked_file_is_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_demo_table_has_the_shape_that_the_demo_prints() -> None:
    from pipeline.demo import STAGES, table

    ways = {way: {"1": 0.0, "5": 0.0, "10": 0.0} for way in ("t2i", "i2t")}
    summary = {
        **dict.fromkeys(STAGES, ways),
        "test_pairs": 375,
        "pairs": 3953,
        "seconds": {"total": 60.0},
        "machine": "m",
        "export": {"image_max_abs_diff": 1e-7, "text_max_abs_diff": 1e-7},
    }
    printed = [re.sub(r"[\d.]+", "0", line) for line in table(summary).splitlines() if line.startswith("|")]
    shown = [
        re.sub(r"[\d.]+", "0", line)
        for line in README.splitlines()
        if re.match(r"\| (Open|start|then|\|)|\|---\|---\|-", line)
    ]
    assert printed == shown
