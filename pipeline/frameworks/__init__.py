"""What published frameworks add to plain fine-tuning, each a word in a recipe: see README.md.

All of it lives at training time: the encoders, and what is exported of them, are those of the backbone.
"""

from __future__ import annotations

from pipeline.frameworks.base import Framework, Views, mean_over_ranks
from pipeline.frameworks.registry import FRAMEWORKS, config_of, make_framework

__all__ = ["FRAMEWORKS", "Framework", "Views", "config_of", "make_framework", "mean_over_ranks"]
