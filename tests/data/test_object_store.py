"""Training data out of an object store: the batches of the local set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.mds import ShardFormat
from shards.reader import set_for_streaming
from shards.writer import write_set
from tests.data.reading import read_epoch, training_data
from tests.ranks import Ranks
from tests.shards.s3 import BUCKET, S3Server, serve_s3
from tests.train.tiny import build_on_rank, write_recipe

SMALL = ShardFormat(size_limit=60_000)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3(monkeypatch) as server:
        yield server


def copy_set(tiny_set: Path, out: str, format: ShardFormat) -> None:
    """The tiny set again, in another place and format."""
    source = tiny_set.parent / "captions.jsonl"
    options = {"split_key": "part"}
    write_set(
        "pairs", source=str(source), images=str(tiny_set.parent / "pictures"), out=out, options=options, format=format
    )


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_samples_in_the_same_order(
    workers: int, compression: str | None, s3: S3Server, tiny_set: Path, tmp_path: Path
) -> None:
    format = ShardFormat(compression, size_limit=SMALL.size_limit)
    url = f"s3://{BUCKET}/tiny"
    copy_set(tiny_set, str(tmp_path / "local"), SMALL)
    copy_set(tiny_set, url, format)
    folder = set_for_streaming(url, tmp_path / "cache")
    assert not list(folder.glob("train/shard*")), "shards come when they are needed"
    local = training_data(tmp_path / "local" / "train", 8, workers=workers)
    remote = training_data(folder / "train", 8, workers=workers)
    for epoch in (0, 1):
        assert read_epoch(remote, epoch) == read_epoch(local, epoch)
    assert len(list(folder.glob("train/shard*.mds"))) == len(list((tmp_path / "local").glob("train/shard*.mds"))) > 2


def _losses(environment: dict[str, str], recipe: str) -> list[float]:
    """Losses of the first steps of a run."""
    import fsspec

    os.environ.update(environment)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    trainer = build_on_rank("zero2", recipe, [])
    batches = trainer.data.epoch(0)
    return [trainer.stepper.micro_batch(next(batches), step, 0)["loss"] for step in range(2)]


def test_a_recipe_names_a_url_and_the_cache(s3: S3Server, tiny_set: Path, tmp_path: Path, ranks: Ranks) -> None:
    url = f"s3://{BUCKET}/tiny"
    copy_set(tiny_set, str(tmp_path / "local"), SMALL)
    copy_set(tiny_set, url, SMALL)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = []
    for data in ({"set": str(tmp_path / "local")}, {"set": url, "cache": str(tmp_path / "c")}):
        recipe = write_recipe(tmp_path, tiny_set, data=data)
        found.append(ranks(2).run(_losses, environment, str(recipe)))
    assert found[0] == found[1]
    assert list((tmp_path / "c").glob("*/train/shard*.mds"))
