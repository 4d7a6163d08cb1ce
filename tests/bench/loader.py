"""Loader samples per second against open_clip's WebDataset loader: python -m tests.bench.loader [--help]

The same JPEG pictures and captions, as MDS shards here and as tars there, through the same transform and tokenizer,
with the same number of workers, in turns; with 0 workers in CPU time, which a busy machine disturbs less. Then where
the time of one sample goes.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip_train import data as open_clip_data
from PIL import Image
from streaming import MDSWriter

from pipeline.data import TrainingData
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from shards.images import decode_rgb
from shards.mds import COLUMNS
from shards.reader import ShardReader
from tests.bench.measure import machine, paired, spread

SIZE, TARS, BATCH = 224, 8, 32
WORDS = ("a", "red", "bus", "stands", "before", "the", "old", "station", "while", "people", "wait", "in", "rain")


def picture(number: int) -> bytes:
    """A JPEG of 640 x 480 with the detail of a photograph: smooth shapes and some noise."""
    draw = np.random.default_rng(number)
    shapes = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((640, 480), Image.BICUBIC)
    noisy = np.asarray(shapes, np.int16) + draw.integers(-12, 13, (480, 640, 3))
    buffer = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def caption(number: int) -> str:
    """About 120 words."""
    return f"picture {number}. " + " ".join(WORDS[(number + k) % len(WORDS)] for k in range(118))


def write(folder: Path, count: int) -> None:
    """The same pairs as MDS shards and as tars."""
    with ExitStack() as stack:
        tars = [stack.enter_context(tarfile.open(folder / f"{k:05}.tar", "w")) for k in range(TARS)]
        writer = stack.enter_context(MDSWriter(out=str(folder / "mds"), columns=COLUMNS, size_limit="32mb"))
        for number in range(count):
            image, text = picture(number), caption(number)
            writer.write({"id": str(number), "image": image, "captions": [text], "meta": {}})
            for suffix, data in (("jpg", image), ("txt", text.encode())):
                member = tarfile.TarInfo(f"{number:08}.{suffix}")
                member.size = len(data)
                tars[number % TARS].addfile(member, io.BytesIO(data))


def theirs(folder: Path, count: int, workers: int, preprocess: Preprocess) -> Any:
    """open_clip's own training loader."""
    size = {"size": SIZE, "mean": preprocess.mean, "std": preprocess.std}
    transform = image_transform_v2(PreprocessCfg(**size), is_train=False)
    options = Namespace(
        train_data=f"{folder}/{{00000..{TARS - 1:05}}}.tar",
        train_num_samples=count,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=BATCH,
        workers=workers,
        world_size=1,
    )
    tokenizer = open_clip.SimpleTokenizer(context_length=248)
    grouped = open_clip_data.group_by_keys_nothrow
    if grouped.__module__ == open_clip_data.__name__:  # webdataset 0.2.96 and later end a tar by {}: a KeyError there
        open_clip_data.group_by_keys_nothrow = lambda files, **more: grouped((f for f in files if f), **more)
    return open_clip_data.get_wds_dataset(options, transform, is_train=True, floor=True, tokenizer=tokenizer).dataloader


def parts(split: Path, preprocess: Preprocess, tokenizer: CaptionTokenizer, count: int) -> dict[str, float]:
    """Milliseconds per sample of reading, decoding, fitting, scaling and tokenizing, each on its own."""
    reader = ShardReader(split)
    samples = [reader[k] for k in range(count)]
    images = [decode_rgb(sample["image"]) for sample in samples]
    fitted = [preprocess.fit(image) for image in images]
    stages: dict[str, Callable[[], object]] = {
        "read from the shard": lambda: [reader[k] for k in range(count)],
        "decode JPEG": lambda: [decode_rgb(sample["image"]) for sample in samples],
        "resize and crop": lambda: [preprocess.fit(image) for image in images],
        "scale and normalise": lambda: [preprocess(image) for image in fitted],
        "tokenize": lambda: tokenizer([sample["captions"][0] for sample in samples]),
    }
    found = {}
    for name, run in stages.items():
        began = time.perf_counter()
        run()
        found[name] = 1e3 * (time.perf_counter() - began) / count
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1024, help="pairs of an epoch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="loader processes, each in turn")
    parser.add_argument("--repeats", type=int, default=5, help="paired epochs")
    options = parser.parse_args()
    spec = {"model_cfg": {"text_cfg": {}}, "context_length": 248}
    preprocess = Preprocess(SIZE, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    tokenizer = CaptionTokenizer(spec)
    torch.set_num_threads(1)  # as in a worker
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.pairs)
        for workers in options.workers:
            sizes = {"batch_size": BATCH, "world_size": 1, "workers": workers, "seed": 0}
            ours, other = (
                TrainingData(folder / "mds", preprocess, tokenizer, **sizes),
                theirs(folder, options.pairs, workers, preprocess),
            )
            epochs = iter(range(10**6))
            counts: dict[str, int] = {}

            def ours_run(data: Any = ours, counts: dict[str, int] = counts, epochs: Any = epochs) -> None:
                counts["ours"] = sum(len(batch["ids"]) for batch in data.epoch(next(epochs)))

            def their_run(data: Any = other, counts: dict[str, int] = counts) -> None:
                counts["theirs"] = sum(len(images) for images, _ in data)

            clock = time.perf_counter if workers else time.process_time
            seconds = paired(their_run, ours_run, options.repeats, clock)
            rates = [
                counts[who] / statistics.median(times)
                for who, times in (("theirs", seconds.first), ("ours", seconds.second))
            ]
            share = counts["ours"] / counts["theirs"]
            print(
                f"{workers} worker(s), {'time' if workers else 'CPU time'}: ours {rates[1]:.0f}/s, "
                f"open_clip's {rates[0]:.0f}/s, ratio {spread([share * ratio for ratio in seconds.ratios])}  target 1.0"
            )
        for stage, ms in parts(folder / "mds", preprocess, tokenizer, min(256, options.pairs)).items():
            print(f"  {stage:20} {ms:6.2f} ms per sample")


if __name__ == "__main__":
    main()
