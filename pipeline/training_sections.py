"""The sections of a recipe that say how it is trained; see `pipeline.sections` for what is read and what is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.sections import Section


class BatchConfig(Section):
    """`size` pairs per optimizer step over all ranks, in `accumulate` micro-batches, and where negatives come from.

    micro: one micro-batch over all ranks. rank: all micro-batches of one rank, without any exchange between ranks.
    global: all micro-batches of all ranks. With rank and global, features are cached and micro-batches encoded twice
    (GradCache): the gradient is that of the full batch in the memory of a micro-batch.
    """

    size: PositiveInt
    accumulate: PositiveInt = 1
    negatives: Literal["micro", "rank", "global"] = "micro"

    def num_negatives(self, world_size: int) -> int:
        """Negatives per positive that the objective sees."""
        parts = {"micro": self.accumulate, "rank": world_size, "global": 1}[self.negatives]
        return self.size // parts - 1


class TokenConfig(Section):
    """Late interaction between patches and words, `weight` times L_tok on top of the objective; 0 is off.

    micro: over one micro-batch of all ranks, as in the paper. global: over all micro-batches of all ranks; token
    features are cached then, and travel between the ranks.
    """

    weight: float = Field(0.0, ge=0)
    scope: Literal["micro", "global"] = "micro"

    def num_negatives(self, batch: BatchConfig) -> int:
        """Negatives per positive that the token term sees."""
        return batch.size // (batch.accumulate if self.scope == "micro" else 1) - 1


class OptimizerConfig(Section):
    """AdamW. Biases, norms and the temperature are not decayed."""

    lr: float = Field(gt=0)
    lr_overrides: dict[str, float] = Field({}, description="learning rate by shell pattern of the parameter name")
    layer_decay: float = Field(1.0, gt=0, le=1, description="lr times this per layer below a tower's head; 1 is off")
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)


class ScheduleConfig(Section):
    """Linear warm-up, then half a cosine to zero at the last step."""

    epochs: PositiveInt
    warmup_steps: int = Field(0, ge=0)


class EvaluateConfig(Section):
    """Validation retrieval after every so many epochs."""

    every_epochs: PositiveInt = 1
    batch_size: PositiveInt = 64


class CheckpointConfig(Section):
    """A checkpoint is written after every epoch, when stopped, and every `every_steps` optimizer steps if set."""

    every_steps: PositiveInt | None = None
    keep: PositiveInt = Field(2, description="how many of the newest stay; the best one stays as well")
    best_by: Literal["mean", "t2i", "i2t"] = Field("mean", description="validation R@1 in which direction")


class EmaConfig(Section):
    """An exponential average of the trained weights: avg = decay avg + (1 - decay) w after every optimizer step.

    Evaluations, export and whatever else reads a checkpoint take the average; training goes on with the raw weights.
    """

    decay: float | None = Field(None, gt=0, lt=1, description="no average when not given")


class RunConfig(Section):
    """Where the run lives and what makes it reproducible."""

    root: str = "runs"
    name: str | None = Field(None, description="folder under root; the recipe's name, numbered, when not given")
    seed: int = 42
    log_every: PositiveInt = 10
    stall_after_s: PositiveFloat | None = Field(
        300, description="a rank in one place for so long says where; null: off"
    )
    stall_exit_s: PositiveFloat = Field(1800, description="and for so long ends the run with exit code 75")

    @model_validator(mode="after")
    def _said_before_the_end(self) -> RunConfig:
        if self.stall_after_s is not None and self.stall_exit_s < self.stall_after_s:
            raise ValueError(f"stall_exit_s {self.stall_exit_s} is less than stall_after_s {self.stall_after_s}")
        return self


class LogConfig(Section):
    """What shows a run besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = Field(True, description="TensorBoard events in the run's folder")
    wandb: bool = Field(False, description="Weights & Biases as well; WANDB_MODE=offline keeps it on this machine")
    wandb_project: str = "hn-clip"
    wandb_name: str | None = Field(None, description="the run's folder when not given")
