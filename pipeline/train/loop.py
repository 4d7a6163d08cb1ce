"""The training loop: batches in, steps, evaluation, checkpoints, a clean stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config import Recipe
from pipeline.data import Batch, TrainingData
from pipeline.evaluate import Encoder, encode_split, retrieval_metrics
from pipeline.runs import Checkpoint, Run, write_json
from pipeline.train.checkpoint import load_zero_state, save_checkpoint
from pipeline.train.distributed import Ranks
from pipeline.train.log import RunLog, SilentLog
from pipeline.train.optim import lr_factor
from pipeline.train.step import NonFiniteLossError, Stepper
from shards.reader import ShardReader


class Stopped(Exception):  # noqa: N818 (not an error: the user asked for it)
    """The run was asked to stop and has saved a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(str(checkpoint.path))
        self.checkpoint = checkpoint


class StopRequest:
    """Remembers SIGINT and SIGTERM until the step is done. The launcher sends both, so further ones change nothing."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True


class Trainer:
    """One run of one recipe on all ranks.

    Args:
        recipe: the experiment.
        engine: the DeepSpeed engine around a `DualEncoder`.
        stepper: makes an optimizer step.
        data: training batches of this rank.
        encoder: the engine as an `Encoder`, for validation.
        val: the validation split, or None.
        ranks: all of them.
        run: the run's folder.
        stop: set by a signal.
        num_parameters: how many train and how many are frozen.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Any,
        stepper: Stepper,
        data: TrainingData,
        encoder: Encoder,
        val: ShardReader | None,
        ranks: Ranks,
        run: Run,
        stop: StopRequest,
        num_parameters: tuple[int, int],
    ) -> None:
        self.recipe = recipe
        self.engine = engine
        self.stepper = stepper
        self.data = data
        self.encoder = encoder
        self.val = val
        self.ranks = ranks
        self.run = run
        self.stop = stop
        self.num_training, self.num_frozen = num_parameters
        self.log: RunLog | SilentLog = SilentLog()
        self.step = 0
        self.epoch = 0  # epochs done
        self.batches_done = 0  # micro-batches done in the current epoch
        self.last_metrics: dict[str, Any] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; micro-batches left over at its end are not used."""
        return len(self.data) // self.recipe.batch.accumulate

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps_per_epoch * self.recipe.schedule.epochs

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run."""
        state = load_zero_state(self.engine, checkpoint, self.ranks)
        self.step, self.epoch, self.batches_done = state["step"], state["epoch"], state["batches_done"]

    def fit(self) -> None:
        """Train to the end of the last epoch.

        Raises:
            Stopped: a signal asked for it; a checkpoint is saved.
            ValueError: the loss is not finite; the ids of the batch are in the run's folder. Or an epoch has no step.
        """
        if self.total_steps == 0:
            raise ValueError(
                f"{self.data.num_pairs} pairs are fewer than one step of {self.recipe.batch.size}: "
                "lower batch.size, or train on a larger split"
            )
        if self.ranks.is_main:
            self.log = RunLog(self.run.path, self.total_steps, self.step)
        try:
            while self.epoch < self.recipe.schedule.epochs:
                self._train_epoch()
                self.epoch, self.batches_done = self.epoch + 1, 0
                if self.val is not None and self.epoch % self.recipe.evaluate.every_epochs == 0:
                    self._evaluate(self.val)
                self.save()
        finally:
            self.log.close()

    def save(self) -> Checkpoint:
        """Write a checkpoint of where the run stands."""
        state = {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "world_size": self.ranks.world_size,
            "recipe": self.recipe.recipe,
            "run": self.run.path.name,
            "data_set": self.recipe.data.set,
            "train_split": self.recipe.data.train_split,
            **self.recipe.negatives(self.ranks.world_size),
            "val": self.last_metrics or None,
        }
        return save_checkpoint(self.engine, self.run, self.ranks, self.step, state, self.recipe.checkpoint.keep)

    def _train_epoch(self) -> None:
        self.engine.train()
        batches = self.data.epoch(self.epoch, self.batches_done)
        steps_left = self.steps_per_epoch - self.batches_done // self.recipe.batch.accumulate
        meter = _Meter(self.recipe.batch.size)
        for _ in range(steps_left):
            self._optimizer_step(batches, meter)
            every = self.recipe.checkpoint.every_steps
            if self.ranks.any(self.stop.asked):
                raise Stopped(self.save())
            if every and self.step % every == 0:
                self.save()

    def _optimizer_step(self, batches: Iterator[Batch], meter: _Meter) -> None:
        factor = lr_factor(self.step, self.total_steps, self.recipe.schedule)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        objective = self.stepper.terms.objective
        objective.set_progress(self.step / self.total_steps)

        def fetch() -> Batch:
            with meter.waiting():
                return next(batches)

        try:
            losses = self.stepper.step(fetch, self.step, self.batches_done)
        except NonFiniteLossError as error:
            self._dump_and_raise(error)
        self.batches_done += self.recipe.batch.accumulate
        self.step += 1
        meter.steps += 1
        if self.step % self.recipe.run.log_every == 0 or self.step == self.total_steps:
            norm = self.engine.get_global_grad_norm()
            self.log.step(
                {
                    "step": self.step,
                    "epoch": self.epoch + 1,
                    **losses,
                    "logit_scale": self.stepper.logit_scale,
                    "lr": self.recipe.optimizer.lr * factor,
                    "grad_norm": None if norm is None else float(norm),  # DeepSpeed knows none at ZeRO-0 in fp32
                    **self.recipe.negatives(self.ranks.world_size),
                    "saturation": objective.saturation(),
                    **meter.read(),
                }
            )

    def _evaluate(self, val: ShardReader) -> None:
        self.engine.eval()
        embeddings = encode_split(self.encoder, val, self.recipe.evaluate.batch_size, self.ranks)
        metrics = retrieval_metrics(embeddings.image_embeds, embeddings.text_embeds, embeddings.owner)
        negatives = self.recipe.negatives(self.ranks.world_size)
        self.last_metrics = {"step": self.step, "epoch": self.epoch, **negatives, **metrics}
        self.log.evaluation(self.last_metrics)
        if self.ranks.is_main:
            folder = self.run.path / "evaluations"
            folder.mkdir(exist_ok=True)
            write_json(folder / f"{self.recipe.data.val_split}-step-{self.step:08d}.json", self.last_metrics)

    def _dump_and_raise(self, error: NonFiniteLossError) -> NoReturn:
        """Every rank comes here at once."""
        ids = self.ranks.gather(error.ids)
        path: Path = self.run.path / "nonfinite.json"
        value, scale = error.loss, self.stepper.logit_scale
        if self.ranks.is_main:
            write_json(path, {"step": self.step + 1, "loss": str(value), "logit_scale": scale, "ids_by_rank": ids})
        raise ValueError(
            f"the loss is {value} at step {self.step + 1}; the batch's ids are in {path}. "
            "Look at those pairs, lower optimizer.lr, or resume from the last checkpoint"
        ) from error


class _Meter:
    """Pairs per second and the share of time spent waiting for data, since it was last read."""

    def __init__(self, pairs_per_step: int) -> None:
        self._pairs_per_step = pairs_per_step
        self._began = time.monotonic()
        self._waited = 0.0
        self._wait_began = 0.0
        self.steps = 0

    def waiting(self) -> _Meter:
        """Time inside the `with` is waiting for data."""
        return self

    def __enter__(self) -> None:
        self._wait_began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._waited += time.monotonic() - self._wait_began

    def read(self) -> dict[str, float]:
        """Figures since the last reading."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        figures = {
            "pairs_per_second": self._pairs_per_step * self.steps / seconds,
            "data_wait": self._waited / seconds,
        }
        self._began, self._waited, self.steps = time.monotonic(), 0.0, 0
        return figures
