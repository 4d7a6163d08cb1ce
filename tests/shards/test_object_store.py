"""Sets in an object store: written as they grow, read through a mirror."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shards import mirror as mirror_module
from shards.mds import ShardFormat
from shards.mirror import mirror
from shards.reader import ShardReader, resolve_set
from shards.remote.filesystem import without_password
from shards.report import Progress
from shards.verify import quick_check, verify_set
from shards.writer import Stopped, write_set
from tests.shards.resume import OPTIONS, SMALL, make_source, tree
from tests.shards.s3 import BUCKET, S3Server, serve_s3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with serve_s3(monkeypatch) as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> dict[str, str]:
    return make_source(tmp_path / "in")


def write(source: dict[str, str], out: str, **more: Any) -> Any:
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, **source, **more}
    return write_set(out=out, **arguments)


def stop_after(count: int) -> Any:
    def stop(progress: Progress) -> None:
        if progress.done == count:
            raise KeyboardInterrupt

    return stop


OUT = f"s3://{BUCKET}/sets/mine"


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
