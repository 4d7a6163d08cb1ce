"""Losses that the adaptive margin competes with, written for reading: every matrix in memory, gradients by autograd.

base.py      what they share: the global batch on every rank, and its matrices
hardness.py  negatives weighted by their hardness: HN-NCE, HCL, debiased
guide.py     false negatives left out by a guide: GIST
soft.py      soft targets: SoftCLIP, CWCL
ranking.py   hinges and regressions on differences of cosines: VSE++, its adaptive-margin twin, ARM
sigmoid.py   a sigmoid per pair: SigLIP, with and without the margin
"""

from __future__ import annotations

from pipeline.objective.rivals.guide import GistLoss
from pipeline.objective.rivals.hardness import DebiasedLoss, HardNegativeNCELoss, HclLoss
from pipeline.objective.rivals.ranking import AdaptiveRelevanceMarginLoss, AdaptiveVseLoss, VseLoss
from pipeline.objective.rivals.sigmoid import SigLipHNLoss, SigLipLoss
from pipeline.objective.rivals.soft import CwclLoss, SoftClipLoss

__all__ = [
    "AdaptiveRelevanceMarginLoss",
    "AdaptiveVseLoss",
    "CwclLoss",
    "DebiasedLoss",
    "GistLoss",
    "HardNegativeNCELoss",
    "HclLoss",
    "SigLipHNLoss",
    "SigLipLoss",
    "SoftClipLoss",
    "VseLoss",
]
