"""Weights of other people's making: which format a file is in, and what it says in open_clip's names."""

from __future__ import annotations

from pipeline.model.formats.recognise import Weights, locate, read_weights

__all__ = ["Weights", "locate", "read_weights"]
