"""Training batches from MDS shards, in an order that depends on the seed and the global batch alone."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from PIL import Image
from streaming import StreamingDataLoader, StreamingDataset
from torch import Tensor

from pipeline.data.augment import Augment
from pipeline.data.captions import CaptionSampler
from pipeline.data.shared_memory import build_dataset
from pipeline.data.stream import MirrorStream
from pipeline.data.views import Views
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.sections import AugmentConfig, CaptionConfig
from shards.images import decode_rgb

# The order of samples follows from this, not from the machines at hand: with 1, any number of ranks sees the same
# global batches.
_CANONICAL_NODES = 1


class Batch(TypedDict):
    """One micro-batch of one rank. `key` comes first: streaming counts samples by the first value of a batch.

    key: int64 [n], equal for equal sample ids. pixel_values: float32 [n, 3, H, W]. input_ids: int64 [n, L], L the
    longest caption of the batch. ids, captions: the n sample ids, and the captions drawn for them, as strings.
    bad: ids of samples that could not be read, and have others in their place.
    num_tokens: of all captions together, without padding. cut: bool [n], captions longer than the context.
    extras: what a framework reads of the pairs besides, as tensors; None without one.
    """

    key: Tensor
    pixel_values: Tensor
    input_ids: Tensor
    ids: list[str]
    captions: list[str]
    bad: list[str]
    num_tokens: int
    cut: Tensor
    extras: dict[str, Tensor] | None


def sample_key(sample_id: str) -> int:
    """A stable 63-bit integer for a sample id, for comparing ids across ranks."""
    return int.from_bytes(hashlib.blake2b(sample_id.encode(), digest_size=8).digest(), "big") >> 1


class PairDataset(StreamingDataset):
    """Pairs of one split: decoded pixels and one caption, drawn by (seed, epoch, id) where there are several.

    Args:
        split_dir: a folder of MDS shards.
        preprocess: the image transform.
        batch_size: pairs per rank and micro-batch; streaming's partition over ranks and workers depends on it.
        seed: of the order and of the caption choice.
        captions: what of a caption is taken.
        augment: what happens to a picture before the transform.
        views: what a framework reads of a pair besides.
    """

    def __init__(
        self,
        split_dir: Path,
        preprocess: Preprocess,
        batch_size: int,
        seed: int,
        captions: CaptionConfig,
        augment: AugmentConfig,
        views: Views | None = None,
    ) -> None:
        super().__init__(
            streams=[MirrorStream(split_dir)],
            batch_size=batch_size,
            shuffle=True,
            shuffle_seed=seed,
            num_canonical_nodes=_CANONICAL_NODES,
        )
        self.preprocess = preprocess
        self.sampler = CaptionSampler(captions, seed)
        self.augment = Augment(augment, seed)
        self.views = views
        self.seed = seed
        self.epoch = 0

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """One pair: id, pixels [3, H, W], caption, and in `bad` what could not be read and stood before it.

        A sample that cannot be read is replaced by the next one of the split, on every rank and in every resumed run
        alike; where that one is in the batch as well, their equal ids keep them from being each other's negatives.

        Raises:
            ValueError: no sample of the split can be read.
        """
        bad: list[str] = []
        for offset in range(self.num_samples):
            number = (sample_id + offset) % self.num_samples
            name = f"number {number}"
            try:
                sample = super().get_item(number, retry)
                name = str(sample["id"])
                image = self.augment(decode_rgb(sample["image"]), name, self.epoch)
                caption = self.sampler(sample["captions"], name, self.epoch)
                view = self._view(sample, image, caption, name)
            except (ValueError, IndexError, KeyError):  # what decoders make of changed bytes
                bad.append(name)
                continue
            return {"id": name, "pixels": self.preprocess(image), "caption": caption, "bad": bad, "view": view}
        raise ValueError(f"no sample of {self.streams[0].local} can be read; run `pipeline shards verify`")

    def _view(self, sample: dict[str, Any], image: Image.Image, caption: str, name: str) -> Any:
        if self.views is None:
            return None
        return self.views.of_pair(sample, image, caption, random.Random(f"views/{self.seed}/{self.epoch}/{name}"))


class Collate:
    """Samples to a `Batch`."""

    def __init__(self, tokenizer: CaptionTokenizer, views: Views | None = None) -> None:
        self.tokenizer = tokenizer
        self.views = views

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        ids = [sample["id"] for sample in samples]
        captions = [sample["caption"] for sample in samples]
        input_ids, cut = self.tokenizer.with_cut(captions)
        return Batch(
            key=torch.tensor([sample_key(i) for i in ids], dtype=torch.int64),
            pixel_values=torch.stack([torch.from_numpy(sample["pixels"]) for sample in samples]),
            input_ids=input_ids,
            ids=ids,
            captions=captions,
            bad=[name for sample in samples for name in sample["bad"]],
            num_tokens=_num_tokens(input_ids, self.tokenizer.pad_id),
            cut=cut,
            extras=self._extras(samples),
        )

    def _extras(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor] | None:
        if self.views is None:
            return None
        return self.views.collate([sample["view"] for sample in samples], self.tokenizer)


class TrainingData:
    """The training split as an endless supply of epochs, resumable between any two batches.

    Args:
        split_dir: a folder of MDS shards.
        preprocess, tokenizer: as the model needs them.
        batch_size: pairs per rank and micro-batch.
        world_size: ranks that share an epoch.
        workers: loader processes of this rank; 0 loads in this process.
        seed: of the order and of the caption choice.
        captions: what of a caption is taken; all of it by default.
        augment: what happens to a picture before the transform; nothing by default.
        views: what a framework reads of a pair besides; nothing by default.

    Raises:
        ValueError: the split has fewer pairs than one global micro-batch, or the views do not follow `augment`.
    """

    def __init__(
        self,
        split_dir: Path,
        preprocess: Preprocess,
        tokenizer: CaptionTokenizer,
        *,
        batch_size: int,
        world_size: int,
        workers: int,
        seed: int,
        captions: CaptionConfig | None = None,
        augment: AugmentConfig | None = None,
        views: Views | None = None,
    ) -> None:
        choices = captions or CaptionConfig(), augment or AugmentConfig(), views
        if views is not None:
            views.check(choices[1])
        self.dataset = build_dataset(lambda: PairDataset(split_dir, preprocess, batch_size, seed, *choices))
        self.batch_size = batch_size
        self.world_size = world_size
        self.num_pairs = int(self.dataset.num_samples)
        if self.num_pairs < batch_size * world_size:
            raise ValueError(
                f"{split_dir} has {self.num_pairs} pairs, fewer than one batch of {batch_size * world_size}: "
                "lower batch.size, or train on a larger split"
            )
        self.loader = StreamingDataLoader(
            self.dataset,
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=Collate(tokenizer, views),
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_signals_to_the_rank,
        )

    def __len__(self) -> int:
        """Micro-batches of one epoch of one rank; a last partial global one is dropped on all ranks alike."""
        return self.num_pairs // (self.batch_size * self.world_size)

    def epoch(self, epoch: int, batches_done: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without the first `batches_done` of each rank. Called by every rank.

        The position is always said outright: streaming's own count of epochs is wrong when a run goes on exactly at
        the end of one, and it passes over a position in an epoch that it has already begun.
        """
        self.dataset.epoch = self.dataset.next_epoch = epoch
        done = batches_done * self.batch_size * self.world_size
        state = self.dataset.state_dict(done, from_beginning=True)
        # The position lies in memory that the ranks of a node share, where a reader could find it half written.
        _wait_for_every_rank()
        self.dataset.load_state_dict({**state, "epoch": epoch})
        _wait_for_every_rank()
        return self._whole_batches(len(self) - batches_done)

    def _whole_batches(self, count: int) -> Iterator[Batch]:
        """The next `count`: streaming repeats pairs to give ranks equally many, which may fill up one more batch."""
        for number, batch in enumerate(self.loader):
            if number < count:
                yield batch


def _num_tokens(input_ids: Tensor, pad_id: int) -> int:
    """Up to the last one of each row that is no padding: CLIP's own tokenizer pads with the id of `!`."""
    place = torch.arange(1, input_ids.shape[1] + 1)
    return int(((input_ids != pad_id) * place).amax(dim=1).sum())


def _wait_for_every_rank() -> None:
    if dist.is_initialized():
        dist.barrier()


def _leave_signals_to_the_rank(worker: int) -> None:
    """Ctrl-C and SIGTERM reach every process of the group; the rank decides what happens, its workers keep serving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Python ends the workers that a rank leaves behind by SIGTERM, which they ignore, and would wait for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
