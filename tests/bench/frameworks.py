"""Frameworks and adapters against plain fine-tuning: python -m tests.bench.frameworks [--help]

One step of each in turns, in one process on the CPU, through the whole of it: engine, encoders, terms, optimizer. A
small ViT and a small text transformer, real OpenMoji pictures and their captions. Once with a batch that is in memory
already, views included, and once with the loader, which reads, decodes and makes views in the same process, so that its
work adds up with that of the step. Memory is what a step allocates. No target: the table is the point.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.frameworks import FRAMEWORKS
from tests.bench.measure import machine, peak_bytes, spread
from tests.fixtures import write_tiny_set
from tests.ranks import Pool
from tests.train.tiny import build_on_rank, write_recipe

MODEL = {
    "model_cfg": {
        "embed_dim": 192,
        "vision_cfg": {"image_size": 128, "patch_size": 16, "width": 192, "layers": 6, "head_width": 64},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 192, "heads": 3, "layers": 4},
    },
}
PLAIN = "plain"


def choices() -> dict[str, dict[str, Any]]:
    """What is compared, by its name in the table: sections of a recipe."""
    infonce = {"objective": {"name": "infonce"}}
    return {
        PLAIN: infonce,
        "plain, hn": {"objective": {"name": "hn"}},
        **{word: {"framework": {"name": word}, **infonce} for word in FRAMEWORKS},
        **{word: {"adapters": {"name": word}, **infonce} for word in ("lora", "dora")},
    }


class Figures(NamedTuple):
    """Of one choice: seconds of every repeat, from memory and with the loader, and the bytes that a step allocates."""

    memory: list[float]
    loader: list[float]
    peak: int


def on_rank(recipes: dict[str, str], steps: int, repeats: int) -> dict[str, Figures]:
    """Measure all, each `steps` steps at a time, in turns; the first turn warms up."""
    trainers = {name: build_on_rank("zero2", recipe, []) for name, recipe in recipes.items()}
    from_memory = {name: stepping(trainer, itertools.repeat(first(trainer))) for name, trainer in trainers.items()}
    with_loader = {name: stepping(trainer, endless(trainer)) for name, trainer in trainers.items()}
    seconds = [in_turns(runs, steps, repeats) for runs in (from_memory, with_loader)]
    return {name: Figures(seconds[0][name], seconds[1][name], peak_bytes(from_memory[name])) for name in trainers}


def first(trainer: Any) -> Any:
    """A batch."""
    return next(trainer.data.epoch(0))


def endless(trainer: Any) -> Iterator[Any]:
    """Batches of one epoch after another."""
    for epoch in itertools.count():
        yield from trainer.data.epoch(epoch)


def stepping(trainer: Any, batches: Iterator[Any]) -> Callable[[], object]:
    """What makes one optimizer step of the next batch."""
    numbers = itertools.count()
    trainer.engine.train()
    return lambda: trainer.stepper.step(lambda: next(batches), next(numbers), 0)


def in_turns(runs: dict[str, Callable[[], object]], steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each, repeat by repeat, so that whatever else the machine does meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(steps):
                run()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(found: dict[str, Figures], pairs: int) -> None:
    """The table; speeds and memory as shares of plain fine-tuning's."""
    plain = found[PLAIN]
    print(f"{'':12} {'in memory':^33}   {'with the loader':^33}   {'memory of a step':^22}")
    for name, figures in found.items():
        cells = []
        for times, reference in ((figures.memory, plain.memory), (figures.loader, plain.loader)):
            ratios = [r / t for r, t in zip(reference, times, strict=True)]
            cells.append(f"{pairs / statistics.median(times):7.1f}/s  {spread(ratios):22}")
        memory = f"{figures.peak / 2**20:7.0f} MB  {figures.peak / plain.peak:5.2f}"
        print(f"{name:12} {cells[0]}   {cells[1]}   {memory}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=2, help="steps of each at a time")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--pairs", type=int, default=256, help="pairs of an epoch")
    parser.add_argument("--only", nargs="+", default=[*choices()], choices=choices(), help="rows of the table")
    options = parser.parse_args()
    pool = Pool(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = write_tiny_set(folder, {"train": options.pairs, "val": 1})
        (folder / "small-vit.json").write_text(json.dumps(MODEL))
        recipes = {}
        for choice, sections in choices().items():
            if choice not in {PLAIN, *options.only}:
                continue
            own = folder / choice.replace(", ", "-")
            own.mkdir()
            sections = {"model": {"name": str(folder / "small-vit.json")}, "batch": {"size": options.batch}, **sections}
            recipes[choice] = str(write_recipe(own, shards, **sections))
        try:
            (found,) = pool.run(on_rank, recipes, options.steps, options.repeats, timeout=3600)
        finally:
            pool.close()
    print(f"{machine()}; {torch.get_num_threads()} threads; {options.batch} pairs a step, float32, AdamW under ZeRO-2")
    print(f"images per second, and as a share of plain: median of {options.repeats} (range)")
    report(found, options.batch * options.steps)


if __name__ == "__main__":
    main()
