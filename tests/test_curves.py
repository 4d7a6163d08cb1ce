"""The curves of a run: what is drawn, on a terminal and as PNG."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.curves import draw, panels, write_png
from pipeline.metrics import read_metrics
from tests.test_runs_command import line, make_run

TERMINAL = re.compile(r"\x1b\[[0-9;]*m")


def test_panels_hold_what_was_logged(tmp_path: Path) -> None:
    found = {panel.title: panel.curves for panel in panels(read_metrics(make_run(tmp_path / "done")))}
    steps = list(range(10, 101, 10))
    assert found["loss"] == {"loss": (steps, [10.0 / s for s in steps])}, "without a token term the objective is all"
    assert found["validation R@1 (%)"]["image to text"] == ([50, 100], [30.0, 20.0])
    assert set(found["learning rate"]) == {"group 0", "group 1"}, "equal groups once"
    assert found["gradient norm"]["gradient norm"][0] == [s for s in steps if s != 20], "nan is a gap"
    assert set(found["share of losses that read 0.0"]) == {"images", "captions"}
    assert set(found["share of the time"]) == {"data", "objective", "communication"}
    with_token = panels([{**line(5), "token": 1.0}])
    assert set(with_token[0].curves) == {"loss", "objective", "token"}
    assert panels([{"step": 1, "negatives": 15}]) == []


def test_many_learning_rates_are_the_highest_and_the_lowest() -> None:
    lines = [{"step": s, "lr_groups": [s * 10.0**-k for k in range(1, 9)]} for s in (1, 2)]
    (panel,) = panels(lines)
    assert panel.curves == {"highest": ([1, 2], [0.1, 0.2]), "lowest": ([1, 2], [1e-8, 2e-8])}


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    found = panels(read_metrics(make_run(tmp_path / "done")))
    assert "\x1b" not in draw(found, 80, colour=False)
    coloured = draw(found, 80, colour=True)
    assert TERMINAL.search(coloured)
    assert max(len(TERMINAL.sub("", row)) for row in coloured.splitlines()) <= 80
    assert "[48;" not in coloured, "the background of the terminal stays"


@pytest.mark.parametrize("lines", [[line(7)], [line(7), line(7)], [line(1), line(10**7)]], ids=["one", "two", "far"])
def test_few_points_can_be_drawn(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    found = panels(lines)
    assert draw(found, 60, colour=False)
    write_png(found, "few", tmp_path / "new" / "few.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["few.png"]
