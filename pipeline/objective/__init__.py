"""Contrastive objectives over the global batch, exact at any number of ranks, without an N x N matrix in memory.

hn_clip.py       HNClipLoss: the objective of arXiv 2608.18521, usable in any training loop
margins.py       its relatives: frozen, centred, uniform and image-side margins
frozen.py        FrozenCaptions: the table that the frozen margin is looked up in
margin_loss.py   what they share: label smoothing, decoupling, masks; InfoNCE, which has no margin
margin.py        a margin that is linear in the features, as a few numbers
schedule.py      a margin that changes in the course of training
smoothing.py     label smoothing without an N x N matrix
contrastive.py   symmetric cross-entropy with given logits: what one step computes, and its gradient
tiles.py         the kernel: statistics and gradients of the logits, a strip of rows at a time
exponentials.py  what the kernel does to a strip between its matrix products
monitor.py       how saturated a loss is, from what the kernel knows anyway
exchange.py      the collectives between ranks
gather.py        all rows on every rank, differentiable
inputs.py        what the objectives accept, and the agreement of the ranks on it
reference.py     the paper's loss, materialised in float64, for tests and readers
token.py         TokenLoss: FILIP's late interaction, in bounded memory (token_inputs.py, token_similarity.py)
rivals/          losses of other forms: HN-NCE, HCL, GIST, SoftCLIP, CWCL, VSE++, ARM, SigLIP
base.py          what a training loop may ask of any objective
registry.py      objectives by the names that recipes use
"""

from __future__ import annotations

from pipeline.objective.base import Objective
from pipeline.objective.frozen import FrozenCaptions
from pipeline.objective.hn_clip import HNClipLoss
from pipeline.objective.margin_loss import InfoNCELoss
from pipeline.objective.margins import CentredHNClipLoss, FrozenHNClipLoss, ImageHNClipLoss, UniformMarginLoss
from pipeline.objective.registry import make_objective
from pipeline.objective.token import TokenLoss

__all__ = [
    "CentredHNClipLoss",
    "FrozenCaptions",
    "FrozenHNClipLoss",
    "HNClipLoss",
    "ImageHNClipLoss",
    "InfoNCELoss",
    "Objective",
    "TokenLoss",
    "UniformMarginLoss",
    "make_objective",
]
