"""A dual encoder and a recipe small enough that a test can train them, and what ranks run in these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16},
        "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}


def write_recipe(folder: Path, shards: Path, **sections: dict[str, Any]) -> Path:
    """A recipe file for the tiny model on a set of shards; `sections` replace single keys of its sections."""
    model = folder / "tiny-clip.json"
    model.write_text(json.dumps(MODEL))
    recipe: dict[str, dict[str, Any]] = {
        "data": {"set": str(shards), "workers": 0},
        "model": {"name": str(model)},
        "objective": {"name": "hn", "gamma": 0.5},
        "batch": {"size": 16},
        "optimizer": {"lr": 1e-3},
        "schedule": {"epochs": 2, "warmup_steps": 2},
        "evaluate": {"batch_size": 8},
        "run": {"root": str(folder / "runs"), "log_every": 1},
    }
    for name, values in sections.items():
        recipe[name] = values if name == "objective" else {**recipe.get(name, {}), **values}
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def write_zero_config(folder: Path, stage: int, **changes: Any) -> Path:
    """The shipped DeepSpeed config of a stage, with changes."""
    from pipeline.config import find_config

    config = json.loads(find_config(f"zero{stage}", "", ".json").read_text())
    path = folder / f"zero{stage}-changed.json"
    path.write_text(json.dumps({**config, **changes}))
    return path


def train_on_rank(config: str, recipe: str, overrides: list[str], resume: str | None = None) -> int:
    """A whole training launch inside a rank; gives its exit code, lets errors through."""
    from pipeline.train.entry import Launch, train

    return train(Launch(config, recipe, overrides, resume))


def build_on_rank(config: str, recipe: str, overrides: list[str]) -> Any:
    """A trainer inside a rank, for tests that step it by hand."""
    from pipeline.config import load_recipe
    from pipeline.runs import Run
    from pipeline.train.build import build_trainer
    from pipeline.train.distributed import distributed
    from pipeline.train.engine import load_deepspeed_config

    parsed = load_recipe(recipe, overrides)
    with distributed() as ranks:  # the pool's own group, which stays
        return build_trainer(parsed, load_deepspeed_config(config), ranks, Run(Path(parsed.run.root) / "by-hand"))


Recorded = tuple[int, list[tuple[int, list[str], list[str]]]]


def train_recording(
    config: str, recipe: str, overrides: list[str], resume: str | None = None, stop_after: int = 0
) -> Recorded:
    """Like `train_on_rank`, with a SIGTERM to the last rank alone after a step.

    Gives the exit code, and (step, ids, captions) of every micro-batch of this rank in the order of training.
    """
    import os
    import signal

    import torch.distributed as dist

    from pipeline.train.loop import Trainer
    from pipeline.train.step import Stepper

    seen: list[tuple[int, list[str], list[str]]] = []
    encode, step = Stepper._encode, Trainer._optimizer_step

    def recorded(self: Any, batch: Any, number: int, *args: Any) -> Any:
        seen.append((number, batch["ids"], batch["captions"]))
        return encode(self, batch, number, *args)

    def step_and_signal(self: Any, *args: Any) -> None:
        step(self, *args)
        if self.step == stop_after and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Stepper._encode, Trainer._optimizer_step = recorded, step_and_signal  # type: ignore[method-assign]
    try:
        return train_on_rank(config, recipe, overrides, resume), seen
    finally:
        Stepper._encode, Trainer._optimizer_step = encode, step  # type: ignore[method-assign]


def losses_of(run: Path) -> list[float]:
    """The loss of every logged step of a run."""
    return [line["loss"] for line in steps_of(run)]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What a run has logged of its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def train_and_hear(config: str, recipe: str, overrides: list[str]) -> tuple[int | str, list[str]]:
    """The exit code, or what the OSError that ended the run says, and the lines that this rank's log said."""
    from pipeline.train.log import RunLog

    said: list[str] = []
    say = RunLog.say

    def heard(self: Any, line: str) -> None:
        said.append(line)
        say(self, line)

    RunLog.say = heard  # type: ignore[method-assign]
    try:
        return train_on_rank(config, recipe, overrides), said
    except OSError as error:
        return str(error), said
    finally:
        RunLog.say = say  # type: ignore[method-assign]
