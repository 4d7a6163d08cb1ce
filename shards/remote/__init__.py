"""Files that are not on this machine: web addresses, and every file system that fsspec knows."""

from __future__ import annotations
