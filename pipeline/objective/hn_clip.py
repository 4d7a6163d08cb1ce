"""HN-CLIP: symmetric contrastive loss whose margin grows with the similarity of the captions."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.objective.contrastive import contrastive_loss

DEFAULT_MEMORY_BUDGET = 256 * 2**20


class HNClipLoss(nn.Module):
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
        group: the ranks that share the global batch; None for the default group where one is initialised.
        memory_budget: bytes for the logits that are in memory at once. More means fewer of them computed twice.

    Inputs:
        ================ ============ =====================================================================
        image_features   `[n, D]`     normalised; float32, float64, bfloat16 or float16
        text_features    `[n, D]`     normalised; row i is the caption of image i; dtype as above
        logit_scale      `[]`, `[1]`  s, already exponentiated (tensor or float), as `open_clip` models give it
        ids              `[n]`        optional int64; pairs of the global batch with equal id are not each
                                      other's negatives
        output_dict                   True returns `{"contrastive_loss": loss}`, as in `open_clip`
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
        group: dist.ProcessGroup | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        super().__init__()
        if not math.isfinite(gamma):
            raise ValueError(f"gamma must be a finite number, not {gamma}")
        if memory_budget <= 0:
            raise ValueError(f"memory_budget is a number of bytes above 0, not {memory_budget}")
        self.gamma = float(gamma)
        self.group = group
        self.memory_budget = memory_budget

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The mean loss of the global batch; see the class for inputs and errors."""
        if not isinstance(logit_scale, Tensor):
            logit_scale = torch.tensor(float(logit_scale), dtype=torch.float64)
        loss = contrastive_loss(
            image_features, text_features, logit_scale, self.gamma, ids, self.group, self.memory_budget
        )
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"gamma={self.gamma}"
