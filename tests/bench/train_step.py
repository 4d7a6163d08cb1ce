"""An optimizer step of ours against open_clip_train's: python -m tests.bench.train_step [--help]

ViT-B/32 with random weights, float32, one process, on the CPU. Ours: HN-CLIP by the trainer, under ZeRO-1. Theirs:
InfoNCE by `open_clip_train.train.train_one_epoch`, with its ClipLoss and the AdamW of its `main`. The same threads, the
same clipping, and the same batch: random pictures through the model's own transform, captions that fill the context.
Run in turns, without a loader; then where the time of each goes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.loss import ClipLoss
from open_clip_train import train as their_train
from open_clip_train.params import parse_args
from open_clip_train.scheduler import cosine_lr
from torch import Tensor

from pipeline.config import parse_recipe
from pipeline.data import Batch
from pipeline.runs import Run
from pipeline.train.build import build_trainer
from pipeline.train.collectives import watched_collectives
from pipeline.train.distributed import Ranks, distributed
from pipeline.train.engine import load_deepspeed_config
from pipeline.train.loop import Trainer
from tests.bench.loader import write
from tests.bench.measure import machine, paired, spread
from tests.bench.spans import Spans

TARGET = 1.1
PARTS = ("forward", "objective", "backward", "optimiser")
CLIP = 1.0  # the gradient's largest norm, as configs/zero1.json has it


def our_trainer(folder: Path, model: str, batch: int, objective: str, ranks: Ranks) -> Trainer:
    """The trainer that `pipeline train` builds, on a set as large as one batch."""
    write(folder, batch)
    os.rename(folder / "mds", folder / "train")
    recipe = parse_recipe(
        {
            "recipe": "bench",
            "data": {"set": str(folder), "val_split": None, "workers": 0},
            "model": {"name": model},
            "objective": {"name": objective},
            "batch": {"size": batch},
            "optimizer": {"lr": 5e-4},
            "schedule": {"epochs": 10**6, "warmup_steps": 10},
            "run": {"root": str(folder / "runs"), "stall_after_s": None},
        },
        "bench",
    )
    config = load_deepspeed_config("zero1")
    assert config["gradient_clipping"] == CLIP
    trainer = build_trainer(recipe, config, ranks, Run(folder / "runs" / "bench"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # no run to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer.engine.train()
    return trainer


def our_step(trainer: Trainer, batch: Batch) -> Callable[[], object]:
    """What the loop does for a step."""
    batches = repeat(batch)

    def run() -> None:
        with watched_collectives(trainer.meter.communication):
            trainer._optimizer_step(batches)
            trainer._asked_to_stop()

    return run


class OneBatch:
    """open_clip_train's data of an epoch of one batch."""

    num_batches = 1

    def __init__(self, pixels: Tensor, ids: Tensor) -> None:
        self.batch = pixels, ids
        self.num_samples = len(ids)
        self.dataloader = self

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is the same."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch


class Theirs:
    """open_clip_train's step, with the defaults of its command line."""

    def __init__(self, name: str, batch: Batch) -> None:
        size = str(len(batch["ids"]))
        options = ["--model", name, "--precision", "fp32", "--grad-clip-norm", str(CLIP), "--batch-size", size]
        self.args = args = parse_args(options)
        vars(args).update(
            device="cpu", distributed=False, rank=0, local_rank=0, world_size=1, distill=False, wandb=False
        )
        logging.disable(logging.WARNING)  # that the weights are random
        self.model = open_clip.create_model(name, output_dict=True)
        logging.disable(logging.NOTSET)
        weights: dict[bool, list[Tensor]] = {True: [], False: []}  # as `main` of open_clip_train tells what decays
        for parameter_name, p in self.model.named_parameters():
            plain = p.ndim < 2 or any(part in parameter_name for part in ("bn", "ln", "bias", "logit_scale"))
            weights[plain].append(p)
        groups = [{"params": weights[True], "weight_decay": 0.0}, {"params": weights[False], "weight_decay": args.wd}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)
        self.loss = ClipLoss()
        self.scheduler = cosine_lr(self.optimizer, args.lr, 10, 10**6)
        self.data = {"train": OneBatch(batch["pixel_values"], batch["input_ids"])}
        self.epoch = 0

    def __call__(self) -> None:
        their_train.train_one_epoch(
            self.model, self.data, self.loss, self.epoch, self.optimizer, None, self.scheduler, None, self.args
        )
        self.epoch += 1


def where(run: Callable[[], object], steps: int, *parts: tuple[Any, str, str]) -> dict[str, float]:
    """Milliseconds of a step, by part, and the rest."""
    spans = Spans()
    began = time.perf_counter()
    with spans.of(*parts):
        for _ in range(steps):
            run()
    total = time.perf_counter() - began
    found: dict[str, float] = {
        **{part: spans.seconds[part] for part in PARTS},
        "rest": total - sum(spans.seconds.values()),
    }
    return {part: 1e3 * seconds / steps for part, seconds in found.items()}


def report(trainer: Trainer, theirs: Theirs, batch: Batch, options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and give the figures."""
    ours, repeats = our_step(trainer, batch), options.repeats
    times = paired(ours, theirs, repeats, time.process_time if options.cpu_time else time.perf_counter)
    pairs = len(batch["ids"])
    print(f"{pairs} pairs of {batch['input_ids'].shape[1]} tokens, {torch.get_num_threads()} threads, fp32")
    print(f"ours {str(times).strip()} theirs; ratio {spread(times.ratios)}  target at most {TARGET}")
    parts = {
        "ours": where(
            ours,
            repeats,
            (trainer.engine, "forward", "forward"),
            (trainer.stepper.terms, "values", "objective"),
            (trainer.engine, "backward", "backward"),
            (trainer.engine, "step", "optimiser"),
        ),
        "theirs": where(
            theirs,
            repeats,
            (theirs.model, "forward", "forward"),
            (theirs.loss, "forward", "objective"),
            (their_train, "backward", "backward"),
            (theirs.optimizer, "step", "optimiser"),
            (torch.nn.utils, "clip_grad_norm_", "optimiser"),
            (theirs.optimizer, "zero_grad", "optimiser"),
        ),
    }
    print("where the time goes, ms per step (clipping counts as optimiser):")
    for part in (*PARTS, "rest"):
        print(f"  {part:10} ours {parts['ours'][part]:8.1f}   theirs {parts['theirs'][part]:8.1f}")
    if options.operators:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ours()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.operators))
    return {
        "machine": machine(),
        "ratio": statistics.median(times.ratios),
        "ratios": times.ratios,
        "seconds": {"ours": times.first, "theirs": times.second},
        "parts_ms": parts,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32", help="an open_clip model with 77 tokens")
    parser.add_argument("--objective", default="hn", help="ours; `infonce` shows what the objective adds")
    parser.add_argument("--batch", type=int, default=32, help="pairs")
    parser.add_argument("--repeats", type=int, default=7, help="paired steps")
    parser.add_argument(
        "--operators", type=int, default=0, metavar="N", help="also the N costliest operators of our step"
    )
    parser.add_argument("--cpu-time", action="store_true", help="ratio of CPU time, which a busy machine disturbs less")
    parser.add_argument("--quick", action="store_true", help="a smoke run: ViT-S-32, few pairs, one repeat")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.model, options.batch, options.repeats = "ViT-S-32", 4, 1
    print(machine())
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, distributed() as ranks:
        trainer = our_trainer(Path(name), options.model, options.batch, options.objective, ranks)
        batch = next(trainer.data.epoch(0))
        found = report(trainer, Theirs(options.model, batch), batch, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
