"""What a training loop may ask of any objective."""

from __future__ import annotations

from torch import nn


class Objective(nn.Module):
    """A loss over a batch of pairs: `(image_features, text_features, logit_scale, ids=...) -> loss`.

    The value is that of the global batch, on every rank. The gradient, once DDP or DeepSpeed has averaged it over the
    ranks, is that of the concatenated batch in one process.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the keyword arguments that it must be called with, beside those above.

        `caption_keys`: `[n]` int64, equal for equal captions. `frozen_text_features`: `[n, D]`, the captions by the
        text encoder that training began with.
        """
        return ()

    def set_progress(self, fraction: float) -> None:
        """Tell how much of the training is done, 0 to 1, before every optimizer step; schedules follow it."""

    def saturation(self) -> dict[str, float | str]:
        """Figures about the last evaluation, for the log; none for an objective that has no monitor.

        Called on all ranks, or on none.
        """
        return {}


def refuse_unless(condition: bool, message: str) -> None:
    """Raise `ValueError` with the message where a parameter cannot be."""
    if not condition:
        raise ValueError(message)
