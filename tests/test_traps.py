"""TRAPS.md tells the truth: every trap has its line, and every test that a line names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "tests" / "TRAPS.md").read_text(encoding="utf-8").splitlines()


def test_every_trap_has_a_line():
    numbers = [int(found[1]) for line in LINES if (found := re.match(r"\| (\d+)\. ", line))]
    assert numbers == [*range(1, 34), *range(41, 46)]


def test_every_named_test_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", "\n".join(LINES))
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in _source(file)]
    assert missing == []


def _source(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""
