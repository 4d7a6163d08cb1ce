"""Tests of the room `shards`."""

from __future__ import annotations
