"""Encoding of a split and exact retrieval metrics, for anything that encodes: a checkpoint, a bundle, a live model."""

from __future__ import annotations

from pipeline.evaluate.encode import Embeddings, Encoder, encode_split
from pipeline.evaluate.recall import retrieval_metrics

__all__ = ["Embeddings", "Encoder", "encode_split", "retrieval_metrics"]
