"""Trained encoders to a bundle: a folder of ONNX graphs and settings that serves without torch."""

from __future__ import annotations
