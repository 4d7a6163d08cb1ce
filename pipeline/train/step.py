"""One optimizer step: batches in, gradients accumulated, weights moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data import Batch, sample_key
from pipeline.model import Features
from pipeline.train.distributed import Ranks
from pipeline.train.further import FurtherInputs
from pipeline.train.grad_cache import cached_step
from pipeline.train.terms import Over, Terms


class NonFiniteError(Exception):
    """The loss or the gradient is not finite, on every rank; the weights have not moved.

    Attributes:
        what: `loss` or `gradient norm`.
        value: nan or inf.
        ids: of this rank's pairs in the step, or in the micro-batch of the loss.
    """

    def __init__(self, what: str, value: float, ids: list[str]) -> None:
        super().__init__(f"the {what} is {value}")
        self.what = what
        self.value = value
        self.ids = ids


class Stepper:
    """Forward, backward and step through the DeepSpeed engine, which accumulates `accumulate` micro-batches.

    Args:
        engine: the DeepSpeed engine around a `DualEncoder`.
        terms: of the loss.
        further: gives what else the objective needs.
        ranks: all of them.
        accumulate: micro-batches per optimizer step.
        seed: of the run.
    """

    def __init__(
        self, engine: Any, terms: Terms, further: FurtherInputs, ranks: Ranks, accumulate: int, seed: int
    ) -> None:
        self.engine = engine
        self.terms = terms
        self.further = further
        self.ranks = ranks
        self.accumulate = accumulate
        self.seed = seed
        self.logit_scale = math.nan  # as the last loss saw it
        self.grad_norm: float | None = None  # of the last step, before clipping; None where fp16 skipped it
        self._ids: list[str] = []  # of the step in hand

    def step(self, fetch: Callable[[], Batch], step: int, first: int) -> dict[str, float]:
        """One optimizer step; gives `loss` and its terms, the same on every rank.

        Args:
            fetch: the next micro-batch.
            step: optimizer steps done.
            first: micro-batches of this epoch done.

        Raises:
            NonFiniteError: on every rank; the weights have not moved.
        """
        self._ids = []
        if self.terms.need_cache:
            return self._cached([fetch() for _ in range(self.accumulate)], step, first)
        return _mean([self.micro_batch(fetch(), step, first + k) for k in range(self.accumulate)])

    def micro_batch(self, batch: Batch, step: int, number: int) -> dict[str, float]:
        """Forward, backward and, at the end of an accumulation, the optimizer's step."""
        features = self._encode(batch, step, number)
        values = self._values(features, [batch], "micro-batch")
        found = self._read(values, [batch])
        self._ids += batch["ids"]
        self.engine.backward(self.terms.total(values))
        self._engine_step()
        return {"loss": self.terms.total(found), **found}

    def _cached(self, batches: Sequence[Batch], step: int, first: int) -> dict[str, float]:
        """Like `step`, with terms over all micro-batches: each is encoded twice, alike."""
        whole: dict[str, float] = {}
        single: list[dict[str, float]] = []

        def encode(number: int) -> Features:
            return self._encode(batches[number], step, first + number)

        def whole_loss(features: Features) -> Tensor:
            values = self._values(features, batches, "step")
            whole.update(self._read(values, batches))
            total: Tensor = self.terms.total(values)
            return total

        def micro_loss(number: int, features: Features) -> Tensor | None:
            values = self._values(features, [batches[number]], "micro-batch")
            single.append(self._read(values, [batches[number]]))
            total: Tensor | None = self.terms.total(values)
            return total

        def backward(part: Tensor) -> None:
            self.engine.backward(part, scale_wrt_gas=False)
            self._engine_step()

        self._ids += [i for batch in batches for i in batch["ids"]]
        cached_step(len(batches), encode, whole_loss, micro_loss, backward)
        found = {**whole, **_mean(single)}
        return {"loss": self.terms.total(found), **found}

    def _engine_step(self) -> None:
        """Count a micro-batch; the last one of a step moves the weights, unless the gradient is not finite.

        DeepSpeed's mixed-precision and ZeRO optimizers leave such a step out, and say so by `overflow`. Plain AdamW
        would take it, so its gradients are looked at before. With fp16 an overflow only lowers the loss scale.
        """
        optimizer = self.engine.optimizer
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()
            return
        norm: float | None = None
        if not hasattr(optimizer, "overflow"):
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
            if not math.isfinite(norm):
                raise NonFiniteError("gradient norm", norm, self._ids)
        self.engine.step()
        if norm is None:
            stated = self.engine.get_global_grad_norm()
            norm = None if stated is None else float(stated)
            if getattr(optimizer, "overflow", False):
                if not self.engine.fp16_enabled():
                    raise NonFiniteError("gradient norm", math.inf if norm is None else norm, self._ids)
                norm = None
        self.grad_norm = norm

    def _encode(self, batch: Batch, step: int, number: int) -> Features:
        # Dropout depends on where the run stands, not on its history: a resumed run draws what it would have drawn,
        # and a micro-batch that is encoded twice draws the same.
        torch.manual_seed(sample_key(f"{self.seed}/{step}/{number}/{self.ranks.rank}"))
        device, dtype = self.ranks.device, next(self.engine.module.parameters()).dtype
        extras = None if self.terms.framework is None else batch["extras"] or {}
        features: Features = self.engine(
            pixel_values=batch["pixel_values"].to(device, dtype, non_blocking=True),
            input_ids=batch["input_ids"].to(device, non_blocking=True),
            tokens=self.terms.token is not None,
            # Floats in the model's precision; an empty dict is a framework that reads nothing more of a pair.
            extras=extras
            and {
                name: view.to(device, dtype if view.is_floating_point() else None, non_blocking=True)
                for name, view in extras.items()
            },
        )
        self.logit_scale = float(features.logit_scale.detach())
        return features

    def _values(self, features: Features, batches: Sequence[Batch], over: Over) -> dict[str, Tensor]:
        keys = torch.cat([batch["key"] for batch in batches]).to(self.ranks.device)
        further = self.further(batches, self.ranks.device) if over == self.terms.objective_over else {}
        return self.terms.values(features, keys, over, further)

    def _read(self, values: dict[str, Tensor], batches: Sequence[Batch]) -> dict[str, float]:
        """The values as numbers, the same on every rank, so that all ranks find one that is not finite together."""
        found = {name: value.item() for name, value in values.items()}
        if self.terms.per_rank and found:
            found = dict(zip(found, self.ranks.mean(list(found.values())), strict=True))
        if not all(map(math.isfinite, found.values())):
            raise NonFiniteError("loss", self.terms.total(found), [i for batch in batches for i in batch["ids"]])
        return found


def _mean(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each number over the micro-batches."""
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
