"""HN-CLIP: symmetric contrastive loss whose margin grows with the similarity of the captions."""

from __future__ import annotations

from typing import Unpack

from pipeline.objective.margin import Margin
from pipeline.objective.margin_loss import MarginLoss, MarginOptions
from pipeline.objective.schedule import GammaSchedule


class HNClipLoss(MarginLoss):
    """InfoNCE over the global batch, with a margin `gamma * cosine of the captions` on every negative.

    The objective `L_HN` of "Which Negatives Matter? Ask Your Text Encoder" (arXiv 2608.18521). With normalised image
    and caption embeddings `v, t`, `S = v t^T`, `G = t t^T`, the learned inverse temperature `s`, and `Gbar` the matrix
    `stopgrad(G)` with a zero diagonal:

        L_HN = 1/2 [CE(s (S + gamma Gbar), y) + CE(s (S + gamma Gbar)^T, y)],    y_i = i

    Negatives whose captions resemble the anchor's are pushed harder. `Gbar` comes from the live text encoder, so the
    margin follows training; it has no parameters and leaves inference alone.

    No N x N matrix is built: memory grows linearly with the batch, apart from `memory_budget`. Under
    `torch.distributed` the negatives are those of the global batch. The value is the mean over the global batch, on
    every rank. The gradient, once DDP or DeepSpeed has averaged it over the ranks, is that of the concatenated batch in
    one process, for the features as well as for the scale: on each of W ranks it is W times that rank's share.

    Args:
        gamma: strength of the margin. 0.5 in the paper, 0 is plain InfoNCE, below 0 favours near-duplicates.
        gamma_schedule: `linear` or `cosine`: gamma goes from `gamma_start` to `gamma` as `set_progress` tells how much
            of the training is done. None: constant.
        gamma_start: where a schedule starts; 0 when not given.
        **options: `label_smoothing`, `decoupled`, `equal_captions`, `group`, `memory_budget`, as in `MarginLoss`.

    Inputs:
        ================ ============ =====================================================================
        image_features   `[n, D]`     normalised; float32, float64, bfloat16 or float16
        text_features    `[n, D]`     normalised; row i is the caption of image i; dtype as above
        logit_scale      `[]`, `[1]`  s, already exponentiated (tensor or float), as `open_clip` models give it
        ids              `[n]`        optional int64; pairs of the global batch with equal id are not each
                                      other's negatives
        output_dict                   True returns `{"contrastive_loss": loss}`, as in `open_clip`
        caption_keys `[n]`            int64, equal for equal captions; with `equal_captions` only
        ================ ============ =====================================================================

    Raises:
        ValueError: inputs that do not fit together. With several ranks, on all of them, also where only the inputs of
            another rank are at fault, or where the ranks bring batches of unequal size.

    Precision:
        Logits are float64 for float64 features, else float32, also under autocast. The tiny losses of well separated
        batches keep their relative accuracy.

    Example:
        >>> import torch
        >>> from torch.nn.functional import normalize
        >>> from pipeline.objective import HNClipLoss
        >>> image_features = normalize(torch.randn(8, 16), dim=1).requires_grad_()
        >>> text_features = normalize(torch.randn(8, 16), dim=1).requires_grad_()
        >>> logit_scale = torch.nn.Parameter(torch.tensor([2.66]))
        >>> loss = HNClipLoss(gamma=0.5)(image_features, text_features, logit_scale.exp())
        >>> loss.backward()
    """

    def __init__(
        self,
        gamma: float = 0.5,
        gamma_schedule: str | None = None,
        gamma_start: float | None = None,
        **options: Unpack[MarginOptions],
    ) -> None:
        super().__init__(**options)
        self._schedule = GammaSchedule(gamma, gamma_start, gamma_schedule)
        self.gamma = self._schedule.at(0.0)

    def margin(self) -> Margin:
        """`gamma G_ij` of the live captions."""
        return Margin(live=self.gamma)

    def set_progress(self, fraction: float) -> None:
        """Set `gamma` to where its schedule is when so much of the training is done, 0 to 1."""
        self.gamma = self._schedule.at(fraction)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return ", ".join(part for part in (f"gamma={self.gamma}", super().extra_repr()) if part)
