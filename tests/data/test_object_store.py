"""Training data out of an object store: the batches of the local set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shards.mds import ShardFormat
from shards.reader import ShardReader, set_for_streaming
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


def copy_set(tiny_set: Path, out: str, format: ShardFormat, **more: Any) -> None:
    """The tiny set again, in another place and format."""
    source, images = tiny_set.parent / "captions.jsonl", tiny_set.parent / "pictures"
    arguments: dict[str, Any] = {"options": {"split_key": "part"}, "format": format, **more}
    write_set("pairs", source=str(source), images=str(images), out=out, **arguments)


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


def _splits_on_a_machine(environment: dict[str, str], recipe: str, home: str) -> tuple[str, bytes]:
    """The train split as a rank sees it that has a folder and a cache of its own; its place, and its index."""
    import fsspec

    from pipeline.config import load_recipe
    from pipeline.train.build import _splits
    from pipeline.train.distributed import distributed

    here, own = Path.cwd(), Path(home, str(dist.get_rank()))
    with mock.patch.dict(os.environ, {**environment, "PIPELINE_CACHE": str(own)}):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        os.chdir(own)
        try:
            with distributed() as ranks:
                train, _ = _splits(load_recipe(recipe, []), ranks)
            return str(train), (train / "index.json").read_bytes()
        finally:
            os.chdir(here)


def test_a_stale_mirror_on_another_machine_is_not_trained_on(
    s3: S3Server, tiny_set: Path, tmp_path: Path, ranks: Ranks
) -> None:
    url = f"s3://{BUCKET}/tiny"
    copy_set(tiny_set, url, SMALL)
    for rank in (0, 1):
        stale = set_for_streaming(url, tmp_path / f"{rank}")
        ShardReader(stale / "train")[0]
    copy_set(tiny_set, url, ShardFormat(size_limit=50_000), overwrite=True)
    recipe = write_recipe(tmp_path, tiny_set, data={"set": url})
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = ranks(2).run(_splits_on_a_machine, environment, str(recipe), str(tmp_path))
    now = s3.objects("tiny")["train/index.json"]
    assert [index for _, index in found] == [now, now]
    assert [Path(place).parents[1] for place, _ in found] == [tmp_path / "0", tmp_path / "1"]
    assert not list(tmp_path.glob("?/*/train/shard*")), "shards of the set before are gone"


def test_machines_with_other_copies_of_a_set_do_not_train(tiny_set: Path, tmp_path: Path, ranks: Ranks) -> None:
    for rank, limit in ((0, 60_000), (1, 50_000)):
        copy_set(tiny_set, str(tmp_path / f"{rank}" / "mine"), ShardFormat(size_limit=limit))
    recipe = write_recipe(tmp_path, tiny_set, data={"set": "mine"})
    with pytest.raises(ValueError, match=r"mine on \S+: it is not that of the main rank's machine: copy it from there"):
        ranks(2).run(_splits_on_a_machine, {}, str(recipe), str(tmp_path))
    (tmp_path / "1" / "mine").rename(tmp_path / "1" / "gone")
    with pytest.raises(ValueError, match=r"mine on \S+: no shard set 'mine'"):
        ranks(2).run(_splits_on_a_machine, {}, str(recipe), str(tmp_path))
