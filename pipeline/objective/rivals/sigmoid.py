"""A sigmoid per pair: SigLIP (arXiv 2303.15343), with and without HN-CLIP's margin."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeline.objective.base import refuse_unless
from pipeline.objective.inputs import Inputs, as_scale
from pipeline.objective.rivals.base import Pairs, Rival, check_number


class SigLipLoss(Rival):
    """`-(1/N) sum_ij log sigmoid(y_ij (s S_ij + b))`, y = 1 on the diagonal and -1 on negatives.

    Args:
        bias: b, where `forward` is not given a learned one; -10 at the start of SigLIP, with s = 10.
        group: see `Rival`.
    """

    def __init__(self, bias: float = -10.0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.bias = check_number("bias", bias)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
        output_dict: bool = False,
        *,
        logit_bias: Tensor | None = None,
        frozen_text_features: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch, the same on every rank; `logit_bias` `[]` or `[1]` is a learned b.

        Raises:
            ValueError: on every rank, if the inputs of any rank cannot be used.
        """
        refuse_unless(logit_bias is None or logit_bias.numel() == 1, "logit_bias must be one number")
        scale = as_scale(logit_scale)
        inputs = Inputs(image_features, text_features, scale, ids, frozen_text_features=frozen_text_features)
        loss = self._of_global_batch(inputs, lambda pairs: self.loss(pairs, logit_bias))
        return {"contrastive_loss": loss} if output_dict else loss

    def loss(self, pairs: Pairs, learned_bias: Tensor | None = None) -> Tensor:
        """Summed over all pairs, divided by N."""
        b = self.bias if learned_bias is None else learned_bias.reshape(()).to(pairs.S.device, pairs.S.dtype)
        positive = F.logsigmoid(pairs.s * pairs.S.diagonal() + b)
        negative = F.logsigmoid(-(pairs.s * self.similarity(pairs) + b)).masked_fill(~pairs.negative, 0.0)
        return -(positive.sum() + negative.sum()) / pairs.S.shape[0]

    def similarity(self, pairs: Pairs) -> Tensor:
        """What a negative is judged by: `[N, N]`."""
        return pairs.S


class SigLipHNLoss(SigLipLoss):
    """SigLIP with HN-CLIP's margin: the logit of a negative is `s (S_ij + gamma stopgrad(t_i.t_j)) + b`.

    Args:
        gamma: strength of the margin.
        bias: as in `SigLipLoss`.
        group: see `Rival`.
    """

    def __init__(self, gamma: float = 0.5, bias: float = -10.0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(bias, group)
        self.gamma = check_number("gamma", gamma)

    def similarity(self, pairs: Pairs) -> Tensor:
        """`S + gamma G`."""
        t = pairs.t.detach()
        return pairs.S + self.gamma * (t @ t.T)
