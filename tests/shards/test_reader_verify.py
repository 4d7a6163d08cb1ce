"""Reading a set back, and finding every kind of damage to it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.mds import ShardFormat
from shards.reader import ShardReader, resolve_set, split_dir
from shards.verify import quick_check, verify_set
from shards.writer import write_set
from tests.shards.layouts import jpeg, write_jsonl, write_tree


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    write_tree(root, {f"{n}.jpg": jpeg(n * 9) for n in range(8)})
    rows = [{"image": f"{n}.jpg", "captions": [f"n {n}", "b"], "split": "val" if n > 5 else "train"} for n in range(8)]
    write_set("pairs", source=str(write_jsonl(root / "list.jsonl", rows)), out=str(root / "set"))
    return root / "set"


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "set"))


def test_random_access_and_pickling(sound: Path) -> None:
    reader = ShardReader(sound / "train")
    assert len(reader) == 6
    assert reader[4] == {"id": "4", "image": jpeg(36), "captions": ["n 4", "b"], "meta": {"image": "4.jpg"}}
    assert reader[-1]["id"] == "5"
    with pytest.raises(IndexError):
        reader[6]
    copy = pickle.loads(pickle.dumps(reader))
    assert copy[0] == reader[0]


def test_several_shards(tmp_path: Path) -> None:
    write_tree(tmp_path, {f"{n}.jpg": jpeg(n) for n in range(9)})
    source = write_jsonl(tmp_path / "list.jsonl", [{"image": f"{n}.jpg", "caption": str(n)} for n in range(9)])
    write_set("pairs", source=str(source), out=str(tmp_path / "set"), format=ShardFormat(size_limit=4000))
    assert len(list((tmp_path / "set" / "train").glob("*.mds"))) > 2
    reader = ShardReader(tmp_path / "set" / "train")
    assert [reader[n]["id"] for n in range(9)] == [str(n) for n in range(9)]
    assert verify_set(tmp_path / "set").ok


def test_streaming_dataset_reads_it_too(sound: Path) -> None:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(sound), split="val", batch_size=1, shuffle=False)
    assert [dataset[n]["id"] for n in range(2)] == ["6", "7"]


def test_sound_set(sound: Path) -> None:
    report = verify_set(sound)
    assert report.ok
    assert (report.samples, report.bytes) == (8, sum(len(jpeg(n * 9)) for n in range(8)))
    assert "is sound" in report.lines()[0]
    quick_check(sound / "train")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncate, r"bytes, not \d+"), (flip_a_bit, "is altered: its xxh64"), (Path.unlink, "is missing")],
)
def test_damage_to_a_shard_is_found(damage: Callable[[Path], None], reason: str, damaged: Path) -> None:
    damage(damaged / "train" / "shard.00000.mds")
    report = verify_set(damaged)
    assert len(report.problems) == 1
    assert report.samples == 2, "the other split is still read"
    with pytest.raises(ValueError, match=reason):
        quick_check(damaged / "train")
    with pytest.raises(ValueError, match=reason):
        raise ValueError(report.problems[0])
    quick_check(damaged / "val")


def test_truncated_or_missing_shard_stops_the_reader(damaged: Path) -> None:
    truncate(damaged / "train" / "shard.00000.mds")
    with pytest.raises(ValueError, match=r"bytes, not \d+: write the set again"):
        ShardReader(damaged / "train")


def test_edited_index_and_strange_files_are_found(damaged: Path) -> None:
    index = damaged / "train" / "index.json"
    content = json.loads(index.read_text())
    content["shards"][0]["samples"] = 5
    index.write_text(json.dumps(content, sort_keys=True))
    (damaged / "train" / "shard.00001.mds").write_bytes(b"")
    (damaged / "test").mkdir()
    text = "\n".join(verify_set(damaged).problems)
    assert "index.json was altered" in text
    assert "5 pairs in the index, 6 in the receipt" in text
    assert "shard.00001.mds is not in the index" in text
    assert f"{damaged / 'test'} is not in the receipt" in text


def test_missing_split_is_found(damaged: Path) -> None:
    shutil.rmtree(damaged / "val")
    assert any("split val" in problem for problem in verify_set(damaged).problems)


def test_bad_picture_and_repeated_id_inside_sound_files_are_found(tmp_path: Path, sound: Path) -> None:
    from streaming import MDSWriter

    from shards.mds import COLUMNS
    from shards.receipt import fingerprint

    folder = Path(shutil.copytree(sound, tmp_path / "set"))
    shutil.rmtree(folder / "train")
    with MDSWriter(columns=COLUMNS, out=str(folder / "train"), hashes=["xxh64"]) as writer:
        for id, image, captions in (("a", jpeg(1), ["x"]), ("a", jpeg(2), ["x"]), ("b", jpeg(3)[:300], ["  "])):
            writer.write({"id": id, "image": image, "captions": captions, "meta": {}})
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"] |= {"written": 3, "index": fingerprint(folder / "train" / "index.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    text = "\n".join(verify_set(folder).problems)
    assert "the id 'a' occurs twice" in text
    assert "'b' has an empty caption" in text
    assert "broken jpeg" in text


def test_errors_name_cause_and_next_step(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)no shard set 'nope'.*make shards DATASET=nope"):
        resolve_set("nope")
    with pytest.raises(ValueError, match="has no split 'test'; it has train, val"):
        split_dir(sound, "test")
    with pytest.raises(ValueError, match=r"does not exist.*pipeline shards write"):
        ShardReader(tmp_path / "nope")
    with pytest.raises(ValueError, match=r"holds no index\.json"):
        quick_check(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        ShardReader(tmp_path)
    with pytest.raises(ValueError, match=r"holds no manifest\.json"):
        verify_set(tmp_path)
    shutil.copytree(sound, tmp_path / "data" / "mds" / "mine")
    assert resolve_set("mine") == Path("data/mds/mine")
    assert split_dir(resolve_set(str(sound)), "val") == sound / "val"
