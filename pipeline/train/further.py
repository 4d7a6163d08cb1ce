"""What some objectives need of a batch beside features, temperature and ids: keys of captions, frozen features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.data import Batch, sample_key
from pipeline.evaluate import Encoder
from pipeline.objective import FrozenCaptions
from pipeline.runs import Run
from pipeline.train.distributed import Ranks
from shards.reader import ShardReader
from shards.staging import sync

FROZEN = "frozen_text_features"
CAPTIONS = "caption_keys"
KEPT = "frozen_captions.safetensors"


class FurtherInputs:
    """The further inputs of an objective, for the pairs of some micro-batches.

    Args:
        needs: their names, as `Objective.needs` gives them.
        frozen: features of every caption of the training split from the encoder that the run began with, where they
            are needed.
    """

    def __init__(self, needs: Sequence[str], frozen: FrozenCaptions | None = None) -> None:
        assert (frozen is not None) == (FROZEN in needs)
        self.needs = needs
        self.frozen = frozen

    def __call__(self, batches: Sequence[Batch], device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of the objective: `caption_keys` int64 [n], `frozen_text_features` [n, D]."""
        further = {}
        if CAPTIONS in self.needs:
            keys = [sample_key(caption) for batch in batches for caption in batch["captions"]]
            further[CAPTIONS] = torch.tensor(keys, dtype=torch.int64, device=device)
        if self.frozen is not None:
            pairs = [pair for batch in batches for pair in zip(batch["ids"], batch["captions"], strict=True)]
            keys = [_pair_key(*pair) for pair in pairs]
            further[FROZEN] = self.frozen.rows(torch.tensor(keys, dtype=torch.int64)).to(device)
        return further


def frozen_captions_of(run: Run, encoder: Encoder, split: ShardReader, batch_size: int, ranks: Ranks) -> FrozenCaptions:
    """Every caption as the encoder saw it when the run began. They are kept in the run's folder: on another number of
    ranks they would differ in their last bits, and what the run began with may not be there any more.

    Args:
        run: its folder; the captions are read where it has a checkpoint to go on from.
        encoder, split, batch_size, ranks: see `freeze_captions`.

    Raises:
        ValueError: what the run has kept cannot be read.
        OSError: they cannot be kept.
    """
    path = run.path / KEPT
    if ranks.on_main(lambda: run.latest() is not None and path.is_file()):
        try:
            kept = load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): remove it, and the captions are encoded again"
            ) from error
        return FrozenCaptions(kept["keys"], kept["features"])
    keys, features = freeze_captions(encoder, split, batch_size, ranks)
    ranks.on_main(lambda: _keep(path, {"keys": keys, "features": features}))
    return FrozenCaptions(keys, features)


def _keep(path: Path, tensors: dict[str, Tensor]) -> None:
    aside = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, aside)
        sync(aside)
        aside.replace(path)
    except SafetensorError as error:  # what the library makes of every OSError
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def freeze_captions(encoder: Encoder, split: ShardReader, batch_size: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Keys [K] and features [K, D] of every caption of a split, as the encoder sees it now, float32, on every rank.

    Each rank encodes its share. All make the same number of calls: under ZeRO-3 a call is collective.

    Args:
        encoder: with the weights that the run begins with.
        split: the training split.
        batch_size: captions per call.
        ranks: all of them.
    """
    samples = (split[i] for i in range(ranks.rank, len(split), ranks.world_size))
    pairs = [(sample["id"], caption) for sample in samples for caption in sample["captions"]]
    calls = max(ranks.gather(math.ceil(len(pairs) / batch_size)))
    parts = []
    for call in range(calls):
        chunk = [caption for _, caption in pairs[call * batch_size : (call + 1) * batch_size]]
        parts.append(torch.from_numpy(encoder.encode_texts(chunk or [""]))[: len(chunk)])
    everyones = ranks.gather(([_pair_key(*pair) for pair in pairs], torch.cat(parts)))
    keys = torch.tensor([key for part, _ in everyones for key in part], dtype=torch.int64)
    return keys, torch.cat([features for _, features in everyones])


def _pair_key(sample_id: str, caption: str) -> int:
    return sample_key(f"{sample_id}\n{caption}")
