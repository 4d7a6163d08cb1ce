"""HN-CLIP: dense-caption retrieval, from image-caption pairs to two encoders that serve."""

from __future__ import annotations

__version__ = "0.1.0"
