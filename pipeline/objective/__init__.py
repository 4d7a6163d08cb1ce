"""Contrastive objectives over the global batch, exact at any number of ranks, without an N x N matrix in memory.

hn_clip.py      HNClipLoss: the objective of arXiv 2608.18521, usable in any training loop
contrastive.py  symmetric cross-entropy with given logits: what one step computes, and its gradient
tiles.py        the kernel: statistics and gradients of the logits, a strip of rows at a time
exchange.py     the collectives between ranks
inputs.py       what the objectives accept, and the agreement of the ranks on it
reference.py    the same loss, materialised in float64, for tests and readers
registry.py     objectives by the names that recipes use
"""

from __future__ import annotations

from pipeline.objective.hn_clip import HNClipLoss
from pipeline.objective.registry import make_objective

__all__ = ["HNClipLoss", "make_objective"]
