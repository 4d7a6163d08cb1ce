"""Image-caption pairs in, MosaicML MDS shards out, in one pass. The README beside this file is the way in."""

from __future__ import annotations
