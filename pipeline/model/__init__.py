"""Dual encoders: any open_clip model, with or without weights that ship in packages."""

from __future__ import annotations

from pipeline.model.checkpoint import load_checkpoint
from pipeline.model.dual_encoder import DualEncoder, Features
from pipeline.model.factory import build_model

__all__ = ["DualEncoder", "Features", "build_model", "load_checkpoint"]
