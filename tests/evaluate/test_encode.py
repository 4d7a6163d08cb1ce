"""Encoding a split: the split's order, any number of ranks, any batch size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.distributed as dist

from pipeline.evaluate import Embeddings, encode_split
from pipeline.evaluate.command import evaluate_model
from pipeline.evaluate.encode import TorchEncoder
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.runs import MANIFEST, MODEL_CONFIG, WEIGHTS, sha256_of, write_json
from pipeline.train.distributed import Ranks
from shards.reader import ShardReader
from tests.fixtures import tiny_clip


def digest(data: bytes) -> list[float]:
    """A unit vector that follows from the bytes alone."""
    numbers = np.frombuffer(hashlib.sha256(data).digest(), np.uint8).astype(np.float32)
    return list(numbers / np.linalg.norm(numbers))


class HashEncoder:
    """Embeds the exact bytes, and counts the sizes of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def encode_images(self, images: Sequence[bytes]) -> Any:
        self.calls.append(("images", len(images)))
        return np.asarray([digest(image) for image in images], np.float32)

    def encode_texts(self, captions: Sequence[str]) -> Any:
        self.calls.append(("texts", len(captions)))
        return np.asarray([digest(caption.encode()) for caption in captions], np.float32)


class Few:
    """The first pairs of a split."""

    def __init__(self, folder: Path, length: int) -> None:
        self.reader, self.length = ShardReader(folder), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self.length
        return self.reader[index]


def expected(reader) -> Embeddings:
    samples = [reader[i] for i in range(len(reader))]
    captions = [(row, caption) for row, sample in enumerate(samples) for caption in sample["captions"]]
    return Embeddings(
        [sample["id"] for sample in samples],
        np.asarray([digest(sample["image"]) for sample in samples], np.float32),
        np.asarray([digest(caption.encode()) for _, caption in captions], np.float32),
        np.asarray([row for row, _ in captions], np.int64),
    )


def assert_same(ours: Embeddings, theirs: Embeddings) -> None:
    assert ours.ids == theirs.ids
    np.testing.assert_array_equal(ours.image_embeds, theirs.image_embeds)
    np.testing.assert_array_equal(ours.text_embeds, theirs.text_embeds)
    np.testing.assert_array_equal(ours.owner, theirs.owner)


def encode_on_rank(folder: Path, length: int, batch_size: int) -> tuple[Embeddings, list[tuple[str, int]]]:
    world = dist.get_world_size()
    me = Ranks(dist.get_rank(), world, dist.get_rank(), world, torch.device("cpu"))
    encoder = HashEncoder()
    return encode_split(encoder, Few(folder, length), batch_size, me), encoder.calls


@pytest.mark.parametrize("batch_size", [1, 5, 24, 100])
def test_one_process_gives_the_splits_order_for_any_batch_size(tiny_set, batch_size):
    reader = ShardReader(tiny_set / "test")
    encoder = HashEncoder()
    done: list[int] = []
    result = encode_split(encoder, reader, batch_size, progress=done.append)
    assert_same(result, expected(reader))
    assert len(result.owner) > len(result.ids) == 24  # some pictures have two captions
    assert max(size for _, size in encoder.calls) <= batch_size
    assert done[-1] == 24
    assert done == sorted(done)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("length", "batch_size"), [(24, 5), (23, 4), (3, 1), (1, 8)])
def test_any_number_of_ranks_gives_the_same_with_as_many_calls_each(ranks, tiny_set, length, batch_size, world):
    """Also where a rank has less to do than the others, or nothing: under ZeRO-3 a call that one skips would hang."""
    folder = tiny_set / "test"
    answers = ranks(world).run(encode_on_rank, folder, length, batch_size)
    for result, _ in answers:
        assert_same(result, expected(Few(folder, length)))
    kinds = [[kind for kind, _ in calls] for _, calls in answers]
    assert all(one == kinds[0] for one in kinds)


def test_a_torch_encoder_gives_what_the_model_gives_pair_by_pair(tiny_set, tmp_path):
    model = tiny_clip(tmp_path)
    preprocess, tokenizer = Preprocess.from_config(model.spec["preprocess_cfg"]), CaptionTokenizer(model.spec)
    reader = ShardReader(tiny_set / "test")
    result = encode_split(TorchEncoder(model, preprocess, tokenizer), reader, batch_size=7)
    assert result.image_embeds.dtype == result.text_embeds.dtype == np.float32
    caption = 0
    for row in range(len(reader)):
        sample = reader[row]
        with torch.no_grad():
            image = model(pixel_values=torch.from_numpy(preprocess.from_bytes(sample["image"]))[None]).image_features
            texts = torch.cat([model(input_ids=tokenizer([c])).text_features for c in sample["captions"]])
        np.testing.assert_allclose(result.image_embeds[row : row + 1], image, atol=1e-5)
        np.testing.assert_allclose(result.text_embeds[caption : caption + len(texts)], texts, atol=1e-5)
        caption += len(texts)


def test_a_checkpoint_is_evaluated_by_its_run(tiny_set, tmp_path):
    from safetensors.torch import save_file

    model = tiny_clip(tmp_path)
    folder = tmp_path / "runs" / "mine" / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in model.encoder_state().items()}, folder / WEIGHTS)
    write_json(folder / MODEL_CONFIG, model.spec)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in folder.iterdir()}
    write_json(folder / MANIFEST, {"step": 3, "files": files})
    write_json(tmp_path / "runs" / "mine" / "run.json", {"recipe": "mine", "created": 1.0})
    metrics = evaluate_model("mine", str(tiny_set), "test", 8, tmp_path / "runs", lambda _: None)
    assert (metrics["model"], metrics["images"], metrics["captions"]) == (str(folder), 24, 32)
    reader = ShardReader(tiny_set / "test")
    lengths = [len(open_clip.get_tokenizer("ViT-B-32").encode(c)) + 2 for k in range(24) for c in reader[k]["captions"]]
    cut = sum(length > 20 for length in lengths) / 32
    assert metrics["captions_cut"] == cut > 0
    assert f"{cut:.1%} of the captions are longer than the context" in metrics["lines"][1]
    assert len(metrics["lines"]) == 4
    again = evaluate_model(str(folder), str(tiny_set), "test", 24, tmp_path / "runs", lambda _: None)
    assert again["t2i"] == metrics["t2i"]
    assert again["i2t"] == metrics["i2t"]
