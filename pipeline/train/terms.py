"""The terms of a run's loss, and over how many pairs each is taken."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from pipeline.config import Recipe
from pipeline.frameworks import Framework
from pipeline.model import Features
from pipeline.objective import make_objective
from pipeline.objective.token import TokenLoss
from pipeline.train.meter import Phase

Over = Literal["micro-batch", "step"]


@dataclass
class Terms:
    """L = L_objective + token_weight L_tok + the weighted terms of a framework.

    Attributes:
        objective: called with image features, text features, logit_scale, ids and whatever else it `needs`.
        token: L_tok, or None.
        token_weight: its weight.
        framework: its own terms are over one micro-batch.
        objective_over, token_over: one micro-batch, or all those of an optimizer step.
        per_rank: whether the objective sees this rank's pairs alone, so that its value differs between ranks.
        phase: counts the time of the terms and of their gradients with respect to the features.
    """

    objective: Any
    token: TokenLoss | None = None
    token_weight: float = 0.0
    framework: Framework | None = None
    objective_over: Over = "micro-batch"
    token_over: Over = "micro-batch"
    per_rank: bool = False
    phase: Phase | None = None

    @property
    def need_cache(self) -> bool:
        """Whether some term is over all micro-batches of a step."""
        return self.objective_over == "step" or (self.token is not None and self.token_over == "step")

    def values(self, features: Features, ids: Tensor, over: Over, further: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms over that many pairs, by name, not weighted.

        Args:
            features: of the pairs of this rank.
            ids: int64 [n], equal for equal samples.
            over: which terms.
            further: what else the objective needs of these pairs.
        """
        with self.phase or nullcontext():
            values = self._values(features, ids, over, further)
        if self.phase is not None:
            _count_backward(self.phase, features, values)
        return values

    def _values(self, features: Features, ids: Tensor, over: Over, further: dict[str, Tensor]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if over == self.objective_over:
            values["objective"] = self.objective(*features[:3], ids=ids, **further)
        if self.token is not None and over == self.token_over:
            assert features.image_tokens is not None
            assert features.text_tokens is not None
            assert features.text_mask is not None
            values["token"] = self.token(
                features.image_tokens, features.text_tokens, features.text_mask, features.logit_scale, ids=ids
            )
        if self.framework is not None and over == "micro-batch":
            values |= self.framework.terms(features, ids)
        return values

    def total(self, values: dict[str, Any]) -> Any:
        """The weighted sum of terms, tensors or numbers; None of none."""
        weights = {"objective": 1.0, "token": self.token_weight}
        if self.framework is not None:
            weights |= self.framework.weights()
        weighted = [v if weights[name] == 1 else weights[name] * v for name, v in values.items()]
        return sum(weighted[1:], weighted[0]) if weighted else None


def _count_backward(phase: Phase, features: Features, values: dict[str, Tensor]) -> None:
    """Let autograd say when it comes to a term, and when the first gradient of features is ready.

    Terms were computed last, so autograd is through with all of them before it goes on to the encoders.
    """
    for value in values.values():
        if value.requires_grad:
            value.register_hook(lambda _: phase.begin())
    for feature in (*features[:-1], *(features.further or {}).values()):
        if feature is not None and feature.requires_grad:
            feature.register_hook(lambda _: phase.end())


def make_terms(recipe: Recipe, rank: int, framework: Framework | None = None) -> Terms:
    """The terms that a recipe names, and its framework's.

    With `batch.negatives: rank` the objective gets a process group of its own.

    Raises:
        ValueError: an objective that cannot leave the other ranks out.
    """
    objective: Any = make_objective(recipe.objective.name, **recipe.objective.params())
    batch, token = recipe.batch, recipe.token
    if batch.negatives == "rank" and dist.get_world_size() > 1:
        if not hasattr(objective, "group"):
            raise ValueError(f"objective '{recipe.objective.name}' has no process group: use batch.negatives=global")
        objective.group = dist.new_group([rank], use_local_synchronization=True)
    several = batch.accumulate > 1
    return Terms(
        objective,
        TokenLoss() if token.weight else None,
        token.weight,
        framework,
        objective_over="step" if several and batch.negatives != "micro" else "micro-batch",
        token_over="step" if several and token.scope == "global" else "micro-batch",
        per_rank=batch.negatives == "rank",
    )
