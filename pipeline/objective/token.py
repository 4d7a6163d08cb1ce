"""The token term of arXiv 2608.18521: FILIP's late interaction (arXiv 2111.07783), exact, in bounded memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.objective.exchange import Exchange
from pipeline.objective.gather import gather_rows, gather_summed
from pipeline.objective.token_inputs import TokenInputs, agree_on_length
from pipeline.objective.token_similarity import token_similarities

DEFAULT_TILE_BUDGET = 128 * 2**20


class TokenLoss(nn.Module):
    """`L_tok`: every patch takes its most similar word, every word its most similar patch, then symmetric InfoNCE.

        i2t_ij = mean over patches p of image i of   max over words w of caption j of   x_ip.y_jw
        t2i_ij = mean over words w of caption j of   max over patches p of image i of   x_ip.y_jw
        L = 1/2 [CE(s i2t, y) + CE(s t2i^T, y)],   y_i = i

    Where the paper is silent: s is the model's own inverse temperature, and learns from this term too; padding, start
    and end tokens are no words, and the class token is no patch; features are those after the final norm, through the
    model's own projection, normalised. A caption without words is as similar as 0 to every image. Pairs of equal id
    are no negatives of each other, as in the objective.

    Over W ranks the negatives are those of all ranks. The value is that of the global batch on every rank, and the
    gradient, once DDP or DeepSpeed has averaged it, is that of the concatenated batch in one process. The words travel:
    an all_gather of them `[N, L, D]` in their own dtype, and a reduce_scatter of their gradient in fp32.

    Args:
        group: the ranks that share the batch; None for the default group where one is initialised.
        tile_budget: bytes of token similarities in memory at once. What is kept beside them: where the maxima are,
            n N (P + L) numbers of 2 bytes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, tile_budget: int = DEFAULT_TILE_BUDGET) -> None:
        super().__init__()
        if tile_budget <= 0:
            raise ValueError(f"tile_budget is a number of bytes above 0, not {tile_budget}")
        self.group = group
        self.tile_budget = tile_budget

    def forward(
        self,
        image_tokens: Tensor,
        text_tokens: Tensor,
        text_mask: Tensor,
        logit_scale: Tensor | float,
        ids: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of the batch of all ranks.

        Args:
            image_tokens: patches `[n, P, D]`, normalised.
            text_tokens: tokens `[n, L, D]`, normalised; L may differ between ranks.
            text_mask: bool `[n, L]`, which of them are words.
            logit_scale: s, already exponentiated, `[]` or `[1]`.
            ids: int64 `[n]`, or None.

        Raises:
            ValueError: on every rank, if the inputs of any rank cannot be used.
        """
        exchange = Exchange(self.group)
        inputs = TokenInputs(image_tokens, text_tokens, text_mask, ids)
        length = agree_on_length(exchange, inputs)
        with torch.autocast(image_tokens.device.type, enabled=False):
            i2t, t2i = self._similarities(inputs, length, exchange)
            equal = _equal_ids(ids, exchange)
            s = logit_scale.reshape(()).to(i2t) if isinstance(logit_scale, Tensor) else logit_scale
            y = torch.arange(len(i2t), device=i2t.device)
            logits = [s * i2t, s * t2i.T]
            if equal is not None:
                logits = [z.masked_fill(equal, -torch.inf) for z in logits]
            return (F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y)) / 2

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"tile_budget={self.tile_budget}"

    def _similarities(self, inputs: TokenInputs, length: int, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """i2t and t2i of all images and captions, `[N, N]` each, on every rank."""
        exact = torch.float64 if inputs.image.dtype == torch.float64 else torch.float32
        padding = length - inputs.text.shape[1]
        text, mask = F.pad(inputs.text, (0, 0, 0, padding)), F.pad(inputs.mask, (0, padding))
        y = gather_summed(_fill(text, mask), exchange, exact)
        mask = exchange.gather(mask.to(torch.uint8)).bool()
        count = mask.sum(1, keepdim=True)
        weights = mask.to(exact) / count.clamp(min=1)
        i2t, t2i = token_similarities(inputs.image.to(exact).contiguous(), y, weights, self.tile_budget)
        i2t = i2t * (count > 0).T
        both = gather_rows(torch.cat([i2t, t2i], dim=1), exchange)
        return tuple(both.chunk(2, dim=1))  # type: ignore[return-value]


def _fill(text: Tensor, mask: Tensor) -> Tensor:
    """Tokens that are no words become copies of the caption's first word, which changes no maximum over its words."""
    first = mask.to(torch.uint8).argmax(dim=1)
    copies = text[torch.arange(len(text), device=text.device), first]
    return torch.where(mask[:, :, None], text, copies[:, None, :])


def _equal_ids(ids: Tensor | None, exchange: Exchange) -> Tensor | None:
    """Which pairs `[N, N]` off the diagonal have equal ids."""
    if ids is None:
        return None
    ids = exchange.gather(ids)
    return (ids[:, None] == ids).fill_diagonal_(False)
