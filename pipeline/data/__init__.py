"""MDS shards to batches."""

from __future__ import annotations

from pipeline.data.loader import Batch, TrainingData, sample_key

__all__ = ["Batch", "TrainingData", "sample_key"]
