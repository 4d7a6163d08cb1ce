"""Adapters (LoRA, DoRA) on the linear layers of any open_clip model, merged into its own weights when saved."""

from __future__ import annotations

from pipeline.model.adapters.adapt import adapt, merge_adapters
from pipeline.model.adapters.base import Adapters
from pipeline.model.adapters.files import adapter_files, load_adapter

__all__ = ["Adapters", "adapt", "adapter_files", "load_adapter", "merge_adapters"]
