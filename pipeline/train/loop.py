"""The training loop: batches in, steps, evaluation, checkpoints, a clean stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config import Recipe
from pipeline.data import Batch, TrainingData
from pipeline.evaluate import Encoder, encode_split, retrieval_metrics
from pipeline.runs import Checkpoint, Run, write_json
from pipeline.train.checkpoint import load_training_state, save_checkpoint
from pipeline.train.collectives import watched_collectives
from pipeline.train.distributed import Ranks
from pipeline.train.log import RunLog, SilentLog
from pipeline.train.meter import Meter
from pipeline.train.optim import lr_factor
from pipeline.train.step import NonFiniteError, Stepper
from pipeline.train.stop import Interrupted, Interruptible, Stopped, StopRequest
from pipeline.train.trouble import BadSamples, write_down
from pipeline.train.watchdog import Watchdog
from pipeline.train.weights import TrainedWeights
from shards.reader import ShardReader


class Trainer:
    """One run of one recipe on all ranks.

    Args:
        recipe: the experiment.
        engine: the DeepSpeed engine around a `DualEncoder`.
        weights: what trains in it, by name, and its average.
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
        weights: TrainedWeights,
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
        self.weights = weights
        self.stepper = stepper
        self.data = data
        self.encoder = encoder
        self.val = val
        self.ranks = ranks
        self.run = run
        self.stop = stop
        self.num_training, self.num_frozen = num_parameters
        self.log: RunLog | SilentLog = SilentLog()
        self.meter = Meter(recipe.batch.size, ranks)
        self.stepper.terms.phase = self.meter.objective
        self.step = 0
        self.epoch = 0  # epochs done
        self.batches_done = 0  # micro-batches done in the current epoch, the same for any number of ranks
        self.owes_evaluation = False  # an epoch is over that was not evaluated yet
        self.bad_samples = BadSamples(recipe.data.max_bad_samples, ranks)
        self.watchdog = Watchdog(ranks.rank, recipe.run.stall_after_s, recipe.run.stall_exit_s)
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
        """Go on from a checkpoint of this run, on any number of ranks.

        Raises:
            ValueError: the loss would be another one on this number of ranks.
        """
        state = load_training_state(self.weights, checkpoint)
        if self.recipe.batch.negatives == "rank" and state["world_size"] != self.ranks.world_size:
            raise ValueError(
                f"batch.negatives=rank draws negatives from one rank's pairs: this run began on {state['world_size']} "
                f"ranks and goes on with --num_gpus {state['world_size']} only"
            )
        self.step, self.epoch = state["step"], state["epoch"]
        self.batches_done = state["samples_done"] * self.recipe.batch.accumulate // self.recipe.batch.size
        self.owes_evaluation = state["owes_evaluation"]
        self.last_metrics = state["val"] or {}
        self.bad_samples.ids = set(state["bad_samples"])

    def fit(self) -> None:
        """Train to the end of the last epoch.

        Raises:
            Stopped: a signal asked for it; a checkpoint is saved.
            ValueError: a loss or gradient is not finite; the ids of the batch are in the run's folder. Or too many
                samples are bad, or an epoch has no step.
            OSError: the last checkpoint cannot be written.
        """
        if self.total_steps == 0:
            raise ValueError(
                f"{self.data.num_pairs} pairs are fewer than one step of {self.recipe.batch.size}: "
                "lower batch.size, or train on a larger split"
            )
        if self.ranks.is_main:
            self.log = RunLog(self.run.path, self.total_steps, self.step, self.recipe)
        try:
            with self.watchdog:
                self._finish_epoch()  # that a stop cut off
                while self.epoch < self.recipe.schedule.epochs:
                    with watched_collectives(self.meter.communication):
                        self._train_epoch()
                    self.epoch, self.batches_done = self.epoch + 1, 0
                    self.owes_evaluation = self.val is not None and self.epoch % self.recipe.evaluate.every_epochs == 0
                    if not self._finish_epoch():
                        self._save_or_go_on()
        finally:
            self.log.close()

    def _finish_epoch(self) -> bool:
        """Evaluate and save, where an epoch is over that was not evaluated; whether it was so."""
        if not self.owes_evaluation:
            return False
        assert self.val is not None
        try:
            self._evaluate(self.val)
        except Interrupted as interrupted:
            raise Stopped(self.save(), interrupted.signal_number) from None
        self.owes_evaluation = False
        self._save_or_go_on()
        return True

    def save(self) -> Checkpoint:
        """Write a checkpoint of where the run stands.

        Raises:
            OSError: it cannot be written; earlier ones are as they were.
        """
        self.watchdog.at("saving a checkpoint", self.step)
        state = {
            "step": self.step,
            "epoch": self.epoch,
            "samples_done": self.batches_done * self.recipe.batch.size // self.recipe.batch.accumulate,
            "owes_evaluation": self.owes_evaluation,
            "world_size": self.ranks.world_size,
            "recipe": self.recipe.recipe,
            "run": self.run.path.name,
            "data_set": self.recipe.data.set,
            "train_split": self.recipe.data.train_split,
            **self.recipe.negatives(self.ranks.world_size),
            "val": self.last_metrics or None,
            "score": self._score(),
            "bad_samples": sorted(self.bad_samples.ids),
        }
        return save_checkpoint(self.weights, self.run, state, self.recipe.checkpoint.keep)

    def _save_or_go_on(self) -> None:
        """Save; a checkpoint that cannot be written ends the run only if no later one will be."""
        try:
            self.save()
        except OSError as error:
            if self.epoch == self.recipe.schedule.epochs:
                raise
            newest = self.run.latest() if self.ranks.is_main else None
            stays = f"{newest.path} stays the newest" if newest else "there is none yet"
            self.log.say(f"warning: the checkpoint of step {self.step} was not saved ({error}); {stays}; going on")

    def _score(self) -> float | None:
        """What the best checkpoint is chosen by, if these very weights were evaluated."""
        if self.last_metrics.get("step") != self.step:
            return None
        t2i, i2t = (float(self.last_metrics[direction]["1"]) for direction in ("t2i", "i2t"))
        return {"t2i": t2i, "i2t": i2t, "mean": (t2i + i2t) / 2}[self.recipe.checkpoint.best_by]

    def _asked_to_stop(self) -> int:
        """The signal that some rank has seen, or 0; the same on all. Collective."""
        return int(self.ranks.max([self.stop.number])[0])

    def _train_epoch(self) -> None:
        self.engine.train()
        batches = self.data.epoch(self.epoch, self.batches_done)
        steps_left = self.steps_per_epoch - self.batches_done // self.recipe.batch.accumulate
        self.meter.restart()
        for _ in range(steps_left):
            self._optimizer_step(batches)
            every = self.recipe.checkpoint.every_steps
            asked = self._asked_to_stop()
            if asked:
                raise Stopped(self.save(), asked)
            if every and self.step % every == 0:
                self._save_or_go_on()

    def _optimizer_step(self, batches: Iterator[Batch]) -> None:
        factor = lr_factor(self.step, self.total_steps, self.recipe.schedule)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        objective = self.stepper.terms.objective
        progress = self.step / self.total_steps
        objective.set_progress(progress)
        if self.stepper.terms.framework is not None:
            self.stepper.terms.framework.set_progress(progress)

        bad: list[str] = []

        def fetch() -> Batch:
            self.watchdog.at("waiting for its loader", self.step + 1)
            with self.meter.data:
                batch = next(batches)
            self.watchdog.at("computing, or in a collective waiting for another rank", self.step + 1)
            self.meter.count(batch)
            bad.extend(batch["bad"])
            return batch

        try:
            losses = self.stepper.step(fetch, self.step, self.batches_done)
        except NonFiniteError as error:
            scale, scaler, norms = self.stepper.logit_scale, self.weights.scaler(), self.weights.norms()
            before = {"logit_scale": scale, "scaler": scaler, "grad_norm_before": self.stepper.grad_norm}
            raise write_down(
                error, self.run.path, self.ranks, step=self.step + 1, **before, weight_norms=norms
            ) from error
        self.weights.update_average()
        self.batches_done += self.recipe.batch.accumulate
        self.step += 1
        if warning := self.bad_samples.add(bad):
            self.log.say(f"warning: step {self.step}: {warning}")
        self.meter.steps += 1
        if self.step % self.recipe.run.log_every == 0 or self.step == self.total_steps:
            self.log.step(
                {
                    "step": self.step,
                    "epoch": self.epoch + 1,
                    **losses,
                    "logit_scale": self.stepper.logit_scale,
                    "lr": self.recipe.optimizer.lr * factor,
                    "lr_groups": [float(group["lr"]) for group in self.engine.optimizer.param_groups],
                    "grad_norm": self.stepper.grad_norm,
                    **self.recipe.negatives(self.ranks.world_size),
                    "saturation": objective.saturation(),
                    **self.meter.read(),
                }
            )

    def _evaluate(self, val: ShardReader) -> None:
        self.engine.eval()
        with self.weights.averaged():
            encoder = Interruptible(self.encoder, self._between_evaluation_batches)
            embeddings = encode_split(encoder, val, self.recipe.evaluate.batch_size, self.ranks)
        metrics = retrieval_metrics(embeddings.image_embeds, embeddings.text_embeds, embeddings.owner)
        negatives = self.recipe.negatives(self.ranks.world_size)
        self.last_metrics = {"step": self.step, "epoch": self.epoch, **negatives, **metrics}
        self.log.evaluation(self.last_metrics)
        if self.ranks.is_main:
            table = self.run.path / "evaluations" / f"{self.recipe.data.val_split}-step-{self.step:08d}.json"
            try:
                table.parent.mkdir(exist_ok=True)
                write_json(table, self.last_metrics)
            except OSError as error:  # the figures are in the log and in the checkpoint that follows
                self.log.say(f"warning: {table} cannot be written ({error}); the run goes on")

    def _between_evaluation_batches(self) -> None:
        self.watchdog.at("evaluation, or in a collective waiting for another rank", self.step)
        if asked := self._asked_to_stop():
            raise Interrupted(asked)
