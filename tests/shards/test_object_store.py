"""Sets that are written to an object store as they grow."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shards import mds
from shards.mds import ShardFormat
from shards.reader import ShardReader, resolve_set
from shards.stopped import Stopped
from shards.verify import verify_set
from tests.shards.resume import tree
from tests.shards.s3 import ALL, BUCKET, S3Server
from tests.shards.storing import OUT, stop_after, write


def test_the_objects_are_the_files_of_a_local_set(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    local = write(source, str(tmp_path / "local"))
    report = write(source, OUT)
    assert s3.objects("sets/mine") == tree(tmp_path / "local")
    assert (report.written, report.out) == (local.written, OUT)
    assert not list(tmp_path.glob("hn-clip-*/*")), "nothing stays on this machine"
    assert write(source, OUT).already_there
    with pytest.raises(ValueError, match="from another request"):
        write(source, OUT, check="header")


def test_indexes_and_receipt_come_last(s3: S3Server, source: dict[str, str]) -> None:
    write(source, OUT)
    puts = [path.removeprefix(f"/{BUCKET}/sets/mine/") for method, path in s3.log if method == "PUT"]
    puts = [name for name in puts if not name.startswith(".writing/")]
    assert puts[-3:] == ["train/index.json", "val/index.json", "manifest.json"]
    shards = [number for number, name in enumerate(puts) if name.endswith(".mds")]
    assert len(shards) > 4
    assert max(shards) < min(number for number, name in enumerate(puts) if not name.endswith(".mds"))


def test_an_unfinished_set_cannot_be_read_and_goes_on(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    write(source, str(tmp_path / "local"))
    with pytest.raises(Stopped, match="pairs are kept"):
        write(source, OUT, progress=stop_after(30))
    names = s3.objects("sets/mine")
    assert any(name.endswith(".mds") for name in names)
    assert not any(name.endswith(("index.json", "manifest.json")) for name in names)
    with pytest.raises(ValueError, match="not complete yet"):
        resolve_set(OUT)
    assert write(source, OUT).went_on_after > 0
    assert s3.objects("sets/mine") == tree(tmp_path / "local")


def test_credentials_revoked_in_between(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    write(source, str(tmp_path / "local"))
    s3.allowed = 6
    with pytest.raises(OSError, match=r"s3://pairs/sets/mine.*access denied.*pairs are kept, the same command goes on"):
        write(source, OUT)
    s3.allowed = None
    said: list[str] = []
    assert write(source, OUT, say=said.append).went_on_after > 0
    assert said[0].startswith("going on: ")
    assert s3.objects("sets/mine") == tree(tmp_path / "local")


def test_no_access_from_the_beginning(s3: S3Server, source: dict[str, str]) -> None:
    s3.allowed = 0
    with pytest.raises(OSError, match=r"access denied"):
        write(source, OUT)
    s3.allowed = None
    with pytest.raises(OSError, match=r"s3://no-such-bucket/x"):
        write(source, "s3://no-such-bucket/x")


@pytest.mark.parametrize("allowed", [2, 3, 4])
def test_access_lost_before_the_first_shard_holds_nothing(s3: S3Server, source: dict[str, str], allowed: int) -> None:
    s3.allowed = allowed
    with pytest.raises(OSError, match=r"access denied"):
        write(source, OUT)
    s3.allowed = None
    assert sum(write(source, OUT).written.values()) > 0


@pytest.mark.long
def test_access_lost_at_any_request(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    """An error that names the place; then nothing that can be read, or all of it; and the next run gives the set."""
    write(source, str(tmp_path / "local"))
    whole = tree(tmp_path / "local")
    write(source, f"{OUT}-free")
    requests, went_on = len(s3.log), []
    assert requests > 25
    s3.counted = ALL
    for allowed in range(requests):
        out = f"{OUT}-{allowed}"
        s3.allowed = allowed
        with pytest.raises(OSError, match=rf"{out}(/manifest.json)?: access denied"):
            write(source, out)
        s3.allowed = None
        left = s3.objects(f"sets/mine-{allowed}")
        if "manifest.json" in left:
            assert whole.items() <= left.items()
        went_on.append(write(source, out).went_on_after)
        assert s3.objects(f"sets/mine-{allowed}") == whole, allowed
    assert max(went_on) > 20


def test_a_full_temporary_folder_is_named_as_such(s3: S3Server, source: dict[str, str], tmp_path: Path) -> None:
    """Shards go away, but lists of contents grow here."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(
            OSError, match=r"^the temporary folder .* cannot be written: No space left on device"
        ) as full:
            write(source, OUT)
    assert str(tmp_path) in str(full.value)
    assert "s3://" not in str(full.value)
    write(source, str(tmp_path / "local"))
    write(source, OUT)
    assert s3.objects("sets/mine") == tree(tmp_path / "local")


def test_shards_with_more_digits_than_others_are_in_their_place(
    s3: S3Server, source: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beyond 99999: shard.10 comes behind shard.9, as text before shard.2."""
    monkeypatch.setattr(mds, "_DIGITS", 1)
    tiny = ShardFormat(size_limit=2400)
    write(source, str(tmp_path / "local"), format=tiny)
    with pytest.raises(Stopped):
        write(source, OUT, format=tiny, progress=stop_after(40))
    names = [name for name in s3.objects("sets/mine") if name.startswith("train/shard.")]
    assert "train/shard.11.mds" in names
    kept = sum(
        json.loads(entry)["spec"]["samples"]
        for name, entry in s3.objects("sets/mine/.writing").items()
        if name.endswith(".mds.json")
    )
    assert write(source, OUT, format=tiny).went_on_after == kept
    assert s3.objects("sets/mine") == tree(tmp_path / "local")
    folder = resolve_set(OUT)
    assert verify_set(folder).ok
    assert [pair["id"] for pair in ShardReader(folder / "train")] == [
        *(pair["id"] for pair in ShardReader(tmp_path / "local" / "train"))
    ]


def test_overwriting_and_a_dropped_write_leave_only_the_new_set(
    s3: S3Server, source: dict[str, str], tmp_path: Path
) -> None:
    write(source, OUT)
    with pytest.raises(Stopped):
        write(source, OUT, format=ShardFormat(size_limit=3000), overwrite=True, progress=stop_after(30))
    assert "manifest.json" not in s3.objects("sets/mine")
    said: list[str] = []
    write(source, OUT, check="header", say=said.append)
    assert "unfinished write of another request" in said[0]
    write(source, str(tmp_path / "local"), check="header")
    assert s3.objects("sets/mine") == tree(tmp_path / "local")


def test_files_of_others_are_not_touched(s3: S3Server, source: dict[str, str]) -> None:
    s3.client().put_object(Bucket=BUCKET, Key="sets/mine/thesis.txt", Body=b"years")
    with pytest.raises(ValueError, match="no set of ours"):
        write(source, OUT, overwrite=True)
    assert s3.objects("sets/mine") == {"thesis.txt": b"years"}
