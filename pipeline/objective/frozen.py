"""Captions as the initial text encoder had them: encoded once, then looked up for every batch."""

from __future__ import annotations

import torch
from torch import Tensor


class FrozenCaptions:
    """A table from keys of captions to their features: K x D numbers in memory, on every rank.

    Args:
        keys: `[K]` int64, one per caption, such as a hash of its pair's id and its text. A key may repeat with equal
            features; the first counts.
        features: `[K, D]`, normalised; kept in their dtype and on their device.

    Raises:
        ValueError: the keys are not `[K]` int64, or there is not one for every row.
    """

    def __init__(self, keys: Tensor, features: Tensor) -> None:
        if keys.dtype != torch.int64 or keys.ndim != 1 or features.ndim != 2 or len(keys) != len(features):
            raise ValueError(
                f"one int64 key [K] per row of the features [K, D] is needed, not {list(keys.shape)} of {keys.dtype} "
                f"for {list(features.shape)}"
            )
        self._keys, order = torch.sort(keys, stable=True)
        self._features = features.detach()[order]

    def __len__(self) -> int:
        return len(self._keys)

    def rows(self, keys: Tensor) -> Tensor:
        """The features `[n, D]` of the captions with these keys `[n]`.

        Raises:
            ValueError: a key is not in the table.
        """
        keys = keys.to(self._keys.device)
        place = torch.searchsorted(self._keys, keys)
        found = self._keys[place.clamp(max=len(self) - 1)] == keys if len(self) else torch.zeros_like(keys).bool()
        if not bool(found.all()):
            missing = int((~found).sum())
            raise ValueError(
                f"{missing} of {len(keys)} captions have no frozen features: encode every caption of the training "
                "split, in each form that a batch may hold, before training begins"
            )
        return self._features[place]
