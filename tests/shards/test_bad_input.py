"""Everything that lies on users' disks and is no good: a clear error, or a counted rejection, and never a half set."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from shards.checking import MAX_CAPTION
from shards.reader import ShardReader
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.conftest import Write, row, siblings
from tests.shards.layouts import encoded, write_jsonl, write_tar, write_tree
from tests.shards.layouts_dense import docci_files
from tests.shards.real import MODES, caption, picture


def bomb() -> bytes:
    """A PNG of a few bytes that claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def broken_pictures() -> dict[str, tuple[bytes, str]]:
    """Files that cannot be pictures, with a word of the reason that has to be given."""
    return {
        "truncated": (picture(1)[: len(picture(1)) // 2], "truncated"),
        "truncated_png": (picture(1, "RGBA")[:-300], "broken png"),
        "empty": (b"", "0 bytes"),
        "page": (b"<!DOCTYPE html><title>403</title>", "DOCTYPE"),
        "appledouble": (b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X", "starts with"),
        "bomb": (bomb(), "too large"),
    }


def rejections(out: Path) -> dict[str, str]:
    lines = (out / "rejected.jsonl").read_text().splitlines()
    return {line["id"]: line["reason"] for line in map(json.loads, lines)}


def test_every_kind_of_picture_is_kept_as_it_is(write: Write, tmp_path: Path) -> None:
    files = {f"{mode.replace(';', '')}.jpg": picture(number, mode) for number, mode in enumerate(MODES)}
    report = write([row(name, caption(number)) for number, name in enumerate(files)], files)
    assert (report.written, report.rejected) == ({"train": len(MODES)}, 0)
    reader = ShardReader(tmp_path / "out" / "train")
    written = {pair["id"] + ".jpg": pair["image"] for pair in map(reader.__getitem__, range(len(reader)))}
    assert written == files, "PNGs called .jpg, 16-bit, CMYK, palettes and transparency: bytes in are bytes out"
    assert verify_set(tmp_path / "out").ok


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_broken_picture_is_rejected_with_its_reason(write: Write, tmp_path: Path) -> None:
    broken = broken_pictures()
    files = {f"{id}.jpg": data for id, (data, _) in broken.items()} | {"good.jpg": picture(2)}
    report = write([row(name) for name in files], files)
    assert (report.written, report.rejected, report.missing) == ({"train": 1}, len(broken), 0)
    found = rejections(tmp_path / "out")
    assert found.keys() == broken.keys()
    for id, (_, word) in broken.items():
        assert word in found[id]


def test_captions_that_are_none_blank_or_endless(write: Write, tmp_path: Path) -> None:
    captions = {
        "none": None,
        "blank": " \n\t\u00a0",
        "list": [None, "", "kept"],
        "endless": "word " * 20_000,
        "long": "w" * MAX_CAPTION,
        "number": 7,
        "absent": ...,
    }
    files = {f"{id}.jpg": picture(number) for number, id in enumerate(captions)}
    rows = [row(f"{id}.jpg", text) for id, text in captions.items()]
    del rows[-1]["caption"]
    report = write(rows, files)
    reader = ShardReader(tmp_path / "out" / "train")
    assert {reader[n]["id"]: reader[n]["captions"] for n in range(len(reader))} == {
        "list": ["kept"],
        "long": [captions["long"]],
    }
    assert report.empty_captions == 4
    assert rejections(tmp_path / "out") == {
        "none": "no caption that is not empty",
        "blank": "no caption that is not empty",
        "endless": "a caption of 100000 characters, above the limit of 65536; is a quotation mark left open?",
        "line 6": "'caption' holds int, not text",
        "line 7": "no 'caption' among image",
    }


def test_ids_that_collide(write: Write, tmp_path: Path) -> None:
    rows = [row("a/1.jpg", key="x"), row("b/1.jpg", key="x"), row("a/1.png", key="y/../z")]
    files = {"a/1.jpg": picture(1), "b/1.jpg": picture(2), "a/1.png": picture(3)}
    report = write(rows, files, options={"id_key": "key"})
    assert report.rejected == 1
    assert rejections(tmp_path / "out")["line 2"] == "id 'x' already stands for 'a/1.jpg', here for 'b/1.jpg'"
    reader = ShardReader(tmp_path / "out" / "train")
    assert [reader[n]["id"] for n in range(2)] == ["x", "y/../z"], "an id is a name, never a path to write to"


def test_a_list_with_a_byte_order_mark_and_keys_with_slashes(tmp_path: Path) -> None:
    rows = [{"image/key": "1.jpg", "text/en": caption(1), "metrics/x": None}]
    source = tmp_path / "list.json"
    source.write_text(json.dumps(rows), encoding="utf-8-sig")
    write_tree(tmp_path, {"1.jpg": picture(1)})
    out = tmp_path / "out"
    write_set("pairs", source=str(source), out=str(out), options={"caption_key": "text/en"})
    assert ShardReader(out / "train")[0]["captions"] == [caption(1)]


def test_a_zip_with_absolute_and_parent_names_writes_nothing_outside(tmp_path: Path) -> None:
    names = ["/etc/1.jpg", "../../2.jpg", "C:\\photos\\3.jpg", "__MACOSX/._4.jpg", "x/._4.jpg", "x/4.jpg"]
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        for number, name in enumerate(names, start=1):
            archive.writestr(name, b"junk" if "._" in name else picture(number))
    source = write_jsonl(tmp_path / "list.jsonl", [row(f"{number}.jpg") for number in range(1, 5)])
    before = {path.name for path in tmp_path.parent.iterdir()}
    report = write_set("pairs", source=str(source), images=str(tmp_path / "odd.zip"), out=str(tmp_path / "out"))
    assert report.written == {"train": 4}
    assert {path.name for path in tmp_path.parent.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"odd.zip", "list.jsonl", "out"}


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_tar_that_is_cut_leaves_no_set(suffix: str, cut: float, tmp_path: Path) -> None:
    lists, pictures = docci_files()
    source = write_tree(tmp_path / "docci", lists)
    noise = {f"images/train_{number:05}.jpg": encoded_noise(number) for number in range(2)}
    path = write_tar(source / f"docci_images.{suffix}", {**pictures, **noise}, "w:gz" if suffix == "tar.gz" else "w")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        write_set("docci", source=str(source), images=str(path), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert siblings(tmp_path / "out") == []


def encoded_noise(number: int) -> bytes:
    """A larger picture that gzip cannot shrink, so that a cut goes through it."""
    from PIL import Image

    return encoded(Image.effect_noise((400, 400), 90 + number), "JPEG", quality=95)


def test_a_locked_zip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "locked.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1.jpg", picture(1))
    data = bytearray(path.read_bytes())
    data[6] |= 1  # the flag for encryption, in the file's header and in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(data))
    source = write_jsonl(tmp_path / "list.jsonl", [row("1.jpg")])
    with pytest.raises(ValueError, match=r"locked\.zip cannot be read .*encrypted"):
        write_set("pairs", source=str(source), images=str(path), out=str(tmp_path / "out"))


def test_missing_pictures_are_an_error_unless_allowed(write: Write, tmp_path: Path) -> None:
    files = {"0.jpg": picture(0)}
    rows = [row(f"{number}.jpg") for number in range(9)]
    arguments: dict[str, Any] = {"source": str(tmp_path / "in" / "list.jsonl"), "out": str(tmp_path / "out")}
    message = (
        r"pairs: 8 pictures are missing, 7 may be: 1 \(1\.jpg\), 2 \(2\.jpg\), 3 \(3\.jpg\), 4 \(4\.jpg\), "
        r"5 \(5\.jpg\) and 3 more\. .*--allow-missing 8"
    )
    with pytest.raises(ValueError, match=message):
        write(rows, files, allow_missing=7)
    assert not (tmp_path / "out").exists()
    assert siblings(tmp_path / "out") == []
    assert write_set("pairs", allow_missing=8, **arguments).missing == 8
    named = [json.loads(line)["id"] for line in (tmp_path / "out" / "missing.jsonl").read_text().splitlines()]
    assert named == [str(number) for number in range(1, 9)]
    assert write_set("pairs", allow_missing=8, **arguments).already_there
    with pytest.raises(ValueError, match=r"out is there without 8 pictures, which its missing\.jsonl names; 0 may be"):
        write_set("pairs", **arguments)
