"""Shards as streaming itself writes and reads them, compressed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streaming import MDSWriter, StreamingDataset
from streaming.base.compression import get_compressions

from shards.mds import COLUMNS, ShardFormat
from shards.reader import ShardReader, set_for_streaming
from shards.verify import quick_check, verify_set
from shards.writer import write_set
from tests.shards.resume import OPTIONS, make_source, tree

FORMATS = [
    ShardFormat(),
    ShardFormat(size_limit=5000),
    ShardFormat(size_limit=1),
    ShardFormat(hashes=()),
    ShardFormat(hashes=("xxh3_64", "sha1")),
    *(ShardFormat(compression, size_limit=9000) for compression in ("zstd", "zstd:7", "gz", "br:5", "bz2", "snappy")),
]


def name_of(format: ShardFormat) -> str:
    return f"{format.compression}-{'+'.join(format.hashes)}-{format.size_limit}"


def write(folder: Path, format: ShardFormat) -> Path:
    write_set(out=str(folder / "out"), options=OPTIONS, format=format, **make_source(folder / "in"))
    return folder / "out"


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_the_files_are_those_of_mdswriter(format: ShardFormat, tmp_path: Path) -> None:
    out = write(tmp_path, format)
    reader = ShardReader(out / "train")
    with MDSWriter(
        out=str(tmp_path / "theirs"),
        columns=COLUMNS,
        compression=format.compression,
        hashes=list(format.hashes),
        size_limit=format.size_limit,
    ) as theirs:
        for index in range(len(reader)):
            theirs.write(reader[index])
    ours = tree(out / "train")
    del ours["contents.jsonl"]
    if format.size_limit == 1:
        # MDSWriter begins with an empty shard where the first sample is above the limit; ours is the next one.
        assert len(ours) == len(tree(tmp_path / "theirs")) - 1
        assert ours["shard.00000.mds"] == tree(tmp_path / "theirs")["shard.00001.mds"]
        return
    gz = (format.compression or "").startswith("gz")  # gzip notes the time
    assert {name: b"" if gz and name.endswith((".gz", ".json")) else data for name, data in ours.items()} == {
        name: b"" if gz and name.endswith((".gz", ".json")) else data
        for name, data in tree(tmp_path / "theirs").items()
    }


@pytest.mark.parametrize("format", FORMATS[4:], ids=name_of)
def test_verify_and_receipt_know_the_format(format: ShardFormat, tmp_path: Path) -> None:
    out = write(tmp_path, format)
    assert verify_set(out).ok
    quick_check(out / "train")
    stated = json.loads((out / "manifest.json").read_text())["request"]["shards"]
    assert stated == {
        "compression": format.compression,
        "hashes": list(format.hashes),
        "size_limit": format.size_limit,
    }
    shard = next(iter(sorted(out.glob("train/shard.00000.mds*"))))
    assert (shard.suffix == ".mds") == (format.compression is None)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    assert any("is altered" in problem for problem in verify_set(out).problems)
    with pytest.raises(ValueError, match="is altered"):
        quick_check(out / "train")


def test_streaming_reads_a_compressed_set_without_touching_it(tmp_path: Path) -> None:
    out = write(tmp_path, ShardFormat("zstd", size_limit=9000))
    before = tree(out)
    from pipeline.data.stream import MirrorStream

    folder = set_for_streaming(str(out), tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    dataset = StreamingDataset(streams=[MirrorStream(folder / "train")], batch_size=1, shuffle=False)
    reader = ShardReader(out / "train")
    assert [sample["id"] for sample in dataset] == [reader[index]["id"] for index in range(len(reader))]
    assert tree(out) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "zip"}, "no compression 'zip': none, or one of br, bz2, gz, snappy, zstd"),
        ({"compression": "zstd:99"}, "no compression 'zstd:99'"),
        ({"hashes": ("xxh65",)}, "no hash 'xxh65'; there are "),
        ({"hashes": ("shake_128",)}, "no hash 'shake_128'"),
        ({"size_limit": 0}, "a shard of 0 bytes is not possible"),
        ({"size_limit": 1 << 32}, "below 4 GiB"),
    ],
)
def test_formats_that_do_not_exist(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardFormat(**arguments)


def test_every_compression_of_streaming_is_known() -> None:
    for name in get_compressions():
        assert ShardFormat(name).compression == name


def test_a_set_from_before_there_were_formats_is_the_default_one(tmp_path: Path) -> None:
    out = write(tmp_path, ShardFormat())
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["request"]["shards"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    source = make_source(tmp_path / "in2") | {"source": str(tmp_path / "in" / "list.jsonl")}
    assert write_set(out=str(out), options=OPTIONS, **source).already_there
    with pytest.raises(ValueError, match=r"\(compression was None, now zstd\)"):
        write_set(out=str(out), options=OPTIONS, format=ShardFormat("zstd"), **source)
