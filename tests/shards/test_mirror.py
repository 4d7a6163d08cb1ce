"""Sets in an object store, read through a mirror."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shards import mirror as mirror_module
from shards.location import location
from shards.mds import ShardFormat
from shards.mirror import mirror
from shards.reader import ShardReader, resolve_set
from shards.remote.filesystem import without_password
from shards.verify import quick_check, verify_set
from tests.shards.s3 import BUCKET, S3Server
from tests.shards.storing import OUT, write


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_reading_and_verifying_through_a_mirror(
    compression: str | None, s3: S3Server, source: dict[str, str], tmp_path: Path
) -> None:
    form = ShardFormat(compression=compression, size_limit=6000)
    write(source, str(tmp_path / "local"), format=form)
    write(source, OUT, format=form)
    folder = resolve_set(OUT)
    ours, theirs = ShardReader(tmp_path / "local" / "train"), ShardReader(folder / "train")
    assert not list(folder.glob("train/shard*"))
    assert ours[3] == theirs[3]
    assert len(list(folder.glob("train/shard*"))) == 1
    assert [ours[index] for index in range(len(ours))] == [theirs[index] for index in range(len(theirs))]
    assert verify_set(folder).ok
    assert resolve_set(OUT) == folder


def test_a_damaged_copy_is_fetched_again_and_a_damaged_object_is_named(s3: S3Server, source: dict[str, str]) -> None:
    write(source, OUT)
    folder = resolve_set(OUT)
    first = ShardReader(folder / "train")[0]
    shard = folder / "train" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    quick_check(folder / "train")
    assert not shard.exists()
    assert ShardReader(folder / "train")[0] == first
    shard.unlink()
    data = s3.objects("sets/mine")["train/shard.00000.mds"]
    s3.client().put_object(Bucket=BUCKET, Key="sets/mine/train/shard.00000.mds", Body=data[:-1] + b"?")
    with pytest.raises(OSError, match=r"shard\.00000\.mds is altered: its xxh64 is"):
        ShardReader(folder / "train")[0]
    assert not shard.exists()
    assert any("shard.00000.mds is altered" in problem for problem in verify_set(folder).problems)


def test_a_set_that_was_written_again_is_mirrored_again(s3: S3Server, source: dict[str, str]) -> None:
    write(source, OUT)
    folder = mirror(OUT)
    ShardReader(folder / "train")[0]
    write(source, OUT, format=ShardFormat(size_limit=3000), overwrite=True)
    assert mirror(OUT) == folder
    index = json.loads((folder / "train" / "index.json").read_text())
    assert index["shards"][0]["size_limit"] == 3000
    assert not list(folder.glob("train/shard*"))


def test_a_mirror_is_of_one_state_of_the_set(s3: S3Server, source: dict[str, str]) -> None:
    write(source, OUT)
    folder = mirror(OUT)
    index = (folder / "train" / "index.json").read_bytes()
    (folder / "train" / "index.json").write_bytes(index.replace(b"mds", b"MDS"))
    assert mirror(OUT) == folder
    assert (folder / "train" / "index.json").read_bytes() == index
    s3.client().put_object(Bucket=BUCKET, Key="sets/mine/val/index.json", Body=b"{}")
    (folder / "manifest.json").unlink()
    with pytest.raises(OSError, match=r"mine/val/index\.json is another one than the manifest says: is the set being"):
        mirror(OUT)


def test_an_unpacked_shard_in_a_mirror_does_not_stand_for_the_packed_one(
    s3: S3Server, source: dict[str, str], tmp_path: Path
) -> None:
    """streaming leaves both beside each other, and either may go."""
    write(source, OUT, format=ShardFormat(compression="zstd", size_limit=6000))
    folder = resolve_set(OUT)
    pair = ShardReader(folder / "train")[0]
    (packed,) = folder.glob("train/shard*.zstd")
    packed.rename(packed.with_suffix(""))  # whatever its bytes
    assert ShardReader(folder / "train")[0] == pair
    assert packed.is_file()


def test_a_file_that_changes_while_it_is_read_is_noticed(s3: S3Server, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000  # three blocks
    s3.client().put_object(Bucket=BUCKET, Key="x.bin", Body=data)
    with location(f"s3://{BUCKET}/x.bin").open("rb") as file:
        assert file.read() == data
    with location(f"s3://{BUCKET}/x.bin").open("rb") as file:
        file.read(1000)
        s3.client().put_object(Bucket=BUCKET, Key="x.bin", Body=data[::-1])
        with pytest.raises(
            OSError, match=r"x\.bin changed while it was read \(ETag was .*\); run again to read the new"
        ):
            file.read()


def test_two_processes_at_one_mirror_make_it_once(
    s3: S3Server, source: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, OUT)
    copy, folders = mirror_module._copy_small_files, []

    def read() -> None:
        folders.append(mirror(OUT))
        ShardReader(folders[0] / "train")[0]

    other = threading.Thread(target=read)

    def copy_while_another_comes(*args: Any) -> None:
        monkeypatch.setattr(mirror_module, "_copy_small_files", copy)
        other.start()
        other.join(timeout=1)  # ends only where it does not wait for this one
        copy(*args)

    monkeypatch.setattr(mirror_module, "_copy_small_files", copy_while_another_comes)
    folder = mirror(OUT)
    other.join()
    assert folders == [folder]
    assert len(list(folder.glob("train/shard*"))) == 1, "what the other had fetched stays"


def test_passwords_are_not_shown_and_no_set_is_read_by_one() -> None:
    assert without_password("sftp://me:secret@host/a/b") == "sftp://me@host/a/b"
    for other in ("abfs://container@account.host/x", "s3://bucket/a:b@c", "hf://datasets/o/n@rev/x", "memory://x"):
        assert without_password(other) == other
    with pytest.raises(ValueError, match=r"^https://host/set: .* must not hold a password") as refused:
        mirror("https://me:secret@host/set")
    assert "secret" not in str(refused.value)
