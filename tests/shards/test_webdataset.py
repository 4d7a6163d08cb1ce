"""Pairs in WebDataset tars, written by the webdataset library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from shards.pair import Pair
from shards.to_webdataset import to_webdataset
from shards.writer import write_set
from tests.shards.http_server import cut, ended, serving
from tests.shards.layouts import UNICODE_CAPTION, write_tar, write_tree
from tests.shards.layouts_dense import docci_files
from tests.shards.layouts_tables import img2dataset_samples, write_samples
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption, picture

ROOT = Path(__file__).parents[2]


def test_pairs_of_several_tars_by_braces_folder_and_star(tmp_path: Path) -> None:
    tars = [write_samples(tmp_path / "laion" / f"{n:05}.tar", img2dataset_samples(3 * n)) for n in (0, 1, 10)]
    (tmp_path / "laion" / "stats.json").write_text("{}")
    items = read_items("webdataset", tmp_path / "laion")
    assert [item.id for item in items] == [f"{n:09}" for n in (0, 1, 2, 3, 4, 5, 30, 31, 32)]
    first, second = items[:2]
    assert isinstance(first, Pair)
    assert isinstance(second, Pair)
    assert (first.image, first.captions, first.split) == (picture(0), [caption(0)], "train")
    assert first.meta == {"url": "https://example.org/0", "caption": "of the json", "key": "000000000"}
    assert second.captions == [UNICODE_CAPTION]
    assert read_items("webdataset", str(tmp_path / "laion/*.tar")) == items
    assert read_items("webdataset", str(tmp_path / "laion/{00000..00001}.tar")) == items[:6]
    assert read_items("webdataset", tars[2]) == items[6:]
    with pytest.raises(FileNotFoundError, match=r"00002\.tar does not exist\. webdataset needs:"):
        read_items("webdataset", str(tmp_path / "laion/{00000..00002}.tar"))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_tars_from_the_web_over_a_bad_line(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "0.001")
    with serving() as web:
        for n in range(3):
            path = write_samples(tmp_path / f"{n:04}.{suffix}", img2dataset_samples(3 * n))
            web.files[f"set/{path.name}"] = path.read_bytes()
            web.troubles[f"set/{path.name}"] = deque([cut(700), ended(2000), ended(0)])
        found = read_items("webdataset", web.url(f"set/{{0000..0002}}.{suffix}"))
        assert found == read_items("webdataset", tmp_path)
        web.troubles.clear()
        assert read_items("webdataset", web.url(f"set/0001.{suffix}")) == found[3:6]
        with pytest.raises(FileNotFoundError, match=r"/set/0003\.tar.* answered 404 Not Found: check the address"):
            read_items("webdataset", web.url(f"set/{{0002..0003}}.{suffix}"))


def test_captions_of_every_form(tmp_path: Path) -> None:
    samples = [
        {"__key__": "list", "png": picture(1, "RGBA"), "txt": "one", "json": {"captions": ["one", "two"]}},
        {"__key__": "known", "webp": b"w", "json": {"caption": "known", "width": 3}},
        {"__key__": "chosen", "JPG": b"j", "json": {"short": "s", "long": ["l1", "l2"]}},
        {"__key__": "none", "jpg": b"j", "cls": b"7"},
        {"__key__": "picture", "txt": "only words"},
        {"__key__": "latin", "jpg": b"j", "txt": b"caf\xe9"},
        {"__key__": "broken", "jpg": b"j", "txt": "x", "json": b"{"},
        {"__key__": "two", "full.jpg": b"f", "thumb.jpg": b"t", "txt": "x"},
        {"__key__": "deep/folder/one", "full.jpg": b"f", "txt": "x"},
    ]
    tar = write_samples(tmp_path / "odd.tar", samples)
    items = read_items("webdataset", tar)
    found = pairs(items)
    assert {id: (pair.captions, pair.meta) for id, pair in found.items()} == {
        "list": (["one", "two"], {}),
        "known": (["known"], {"width": 3}),
        "deep/folder/one": (["x"], {}),
    }
    assert found["list"].image == picture(1, "RGBA")
    assert reasons(items) == {
        "odd.tar: chosen": "no caption among jpg, json; its .json has short, long",
        "odd.tar: none": "no caption among cls, jpg",
        "odd.tar: picture": "no picture among txt",
        "odd.tar: latin": "its .txt is not UTF-8 (unexpected end of data at byte 3); save it as UTF-8",
        "odd.tar: broken": reasons(items)["odd.tar: broken"],
        "odd.tar: two": "several pictures: full.jpg, thumb.jpg; state image_key",
    }
    assert reasons(items)["odd.tar: broken"].startswith("its .json is not JSON: ")
    chosen = read_items("webdataset", tar, caption_key="json:long", image_key="jpg")
    assert pairs(chosen)["chosen"].captions == ["l1", "l2"]
    assert pairs(chosen)["chosen"].meta == {"short": "s"}
    thumbs = pairs(read_items("webdataset", tar, image_key="Thumb.jpg"))
    assert {id: pair.image for id, pair in thumbs.items()} == {"two": b"t"}


def test_ids_and_splits(tmp_path: Path) -> None:
    sample = {"__key__": "0001", "jpg": b"j", "txt": "x", "json": {"uid": "u7"}}
    for name in ("train-000", "validation-000", "000"):
        write_samples(tmp_path / f"{name}.tar", [sample])

    def ids(**options: str) -> list[tuple[str, str]]:
        items = [item for item in read_items("webdataset", tmp_path, **options) if isinstance(item, Pair)]
        return [(pair.id, pair.split) for pair in items]

    assert ids() == [("0001", "train"), ("0001", "val"), ("0001", "train")]
    assert ids(id_key="tar") == [("train-000/0001", "train"), ("validation-000/0001", "val"), ("000/0001", "train")]
    assert ids(id_key="json:uid", split="mine") == [("u7", "mine")] * 3
    assert {split for _, split in ids(split="hash")} <= {"train", "val", "test"}


def test_our_own_tars_give_back_the_pairs(tmp_path: Path) -> None:
    """What `pipeline shards to-webdataset` writes, by hand and by itself."""
    own = {"id": "a/b.c", "captions": ["x", "y"], "meta": {"cluster_id": 7}}
    tar = write_samples(tmp_path / "test5100-000000.tar", [{"__key__": "0", "jpg": b"j", "txt": "x", "json": own}])
    assert read_items("webdataset", tar) == [Pair("a/b.c", b"j", ["x", "y"], "test5100", {"cluster_id": 7})]
    lists, pictures = docci_files()
    source = write_tree(tmp_path / "docci", lists | pictures)
    write_set("docci", source=str(source), out=str(tmp_path / "set"), options={"splits": "train,test5100,qual_dev"})
    to_webdataset(tmp_path / "set", tmp_path / "tars")
    found = pairs(read_items("webdataset", tmp_path / "tars"))
    assert found == pairs(read_items("docci", source, splits="train,test5100,qual_dev"))
    assert found["train_00000"].meta == {"cluster_id": 7, "entity_tags": ["dog"]}


def test_reading_leaves_torch_alone(tmp_path: Path) -> None:
    """It takes more memory than a million pairs; and whoever needs it afterwards finds it, and the library, whole."""
    write_samples(tmp_path / "a.tar", img2dataset_samples())
    program = """
import sys
from tests.shards.reading import read_items
assert len(read_items("webdataset", sys.argv[1])) == 3
assert "torch" not in sys.modules
import webdataset, torch
assert issubclass(webdataset.WebDataset, torch.utils.data.IterableDataset)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.tar")], cwd=ROOT, check=True, timeout=300)


def test_damaged_tars_are_named(tmp_path: Path) -> None:
    tar = write_samples(tmp_path / "000.tar", img2dataset_samples())
    tar.write_bytes(tar.read_bytes()[:5000])
    with pytest.raises(
        ValueError, match=r"000\.tar is damaged or incomplete \(unexpected end of data\); fetch it again"
    ):
        read_items("webdataset", tar)
    tar.write_bytes(b"<html>" * 1000)
    with pytest.raises(ValueError, match=r"000\.tar is damaged or incomplete"):
        read_items("webdataset", tar)
    write_tar(tar, [("1.jpg", b"j"), ("1.txt", b"x"), ("1.jpg", b"k")])
    with pytest.raises(ValueError, match=r"000\.tar is damaged or incomplete \(1\.jpg: duplicate file name"):
        read_items("webdataset", tar)
    tar.unlink()
    with pytest.raises(ValueError, match=r"holds no \.tar or \.tar\.gz or \.tgz files\. webdataset needs:"):
        read_items("webdataset", tmp_path)


def test_the_json_is_read_as_it_stands(tmp_path: Path) -> None:
    said = {"caption": UNICODE_CAPTION, "nested": {"a": [1, None, 2.5]}}
    tar = write_samples(tmp_path / "t.tar", [{"__key__": "0", "jpg": b"j", "json": json.dumps(said).encode()}])
    (pair,) = read_items("webdataset", tar)
    assert isinstance(pair, Pair)
    assert (pair.captions, pair.meta) == ([UNICODE_CAPTION], {"nested": {"a": [1, None, 2.5]}})
