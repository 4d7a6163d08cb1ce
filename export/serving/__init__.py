"""Search over a picture collection with a bundle: the index, the query, the result sheet. No torch."""

from __future__ import annotations
