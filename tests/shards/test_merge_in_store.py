"""Parts in an object store, put together there or here."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.merge import merge_parts
from shards.parts import Part
from shards.reader import ShardReader, resolve_set
from tests.shards.resume import tree
from tests.shards.s3 import BUCKET, S3Server
from tests.shards.storing import OUT, write
from tests.shards.test_parts import write_parts


def test_parts_in_a_store_are_merged_within_it(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    local, places = write_parts(tmp_path, 3, **source), [f"{OUT}.parts/{number}-of-3" for number in (1, 2, 3)]
    for number, place in enumerate(places, 1):
        write(source, place, part=Part(number, 3))
    merge_parts(str(tmp_path / "merged"), local)
    s3.log.clear()
    merge_parts(OUT, places)
    assert not [path for method, path in s3.log if method == "GET" and path.endswith(".mds")]
    assert s3.objects("sets/mine") == tree(tmp_path / "merged")
    assert not list((tmp_path / "cache").rglob("*.mds"))


def test_parts_in_a_store_are_merged_to_a_folder_and_do_not_stay_in_the_cache(
    s3: S3Server, source: dict[str, str], tmp_path: Path
) -> None:
    local, places = write_parts(tmp_path, 2, **source), [f"{OUT}.parts/{number}-of-2" for number in (1, 2)]
    for number, place in enumerate(places, 1):
        write(source, place, part=Part(number, 2))
    ShardReader(resolve_set(places[0]) / "train")[0]
    merge_parts(str(tmp_path / "merged"), local)
    merge_parts(str(tmp_path / "again"), places)
    assert tree(tmp_path / "again") == tree(tmp_path / "merged")
    assert [path.name for path in (tmp_path / "cache").rglob("*.mds")] == ["shard.00000.mds"], "it was there before"


def test_a_part_whose_shard_is_another_one_is_not_merged(s3: S3Server, source: dict[str, str]) -> None:
    write(source, f"{OUT}.parts/1-of-1", part=Part(1, 1))
    s3.client().put_object(Bucket=BUCKET, Key="sets/mine.parts/1-of-1/train/shard.00001.mds", Body=b"short")
    with pytest.raises(OSError, match=r"1-of-1/train/shard\.00001\.mds has 5 bytes, not \d+"):
        merge_parts(OUT, [f"{OUT}.parts/1-of-1"])
    assert "manifest.json" not in s3.objects("sets/mine")
