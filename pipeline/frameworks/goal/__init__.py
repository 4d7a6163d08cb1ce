"""GOAL: see framework.py.

framework.py   its formulas, options, forward pass and terms
views.py       the local pair of a pair, made in the loader
boxes.py       boxes and patches: what lies in one, which to propose, the picture cut out of one
spans.py       where a sentence stands among the tokens of a caption
"""

from __future__ import annotations

from pipeline.frameworks.goal.framework import Goal, GoalConfig

__all__ = ["Goal", "GoalConfig"]
