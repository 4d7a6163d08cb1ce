"""What `info` and `preview` say about a set, against counts made by hand."""

from __future__ import annotations

import base64
import html
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from shards.info import describe_set
from shards.preview import write_preview
from shards.writer import write_set
from tests.shards.conftest import Write, row
from tests.shards.layouts import dci_files, write_tree
from tests.shards.layouts_dense import urban1k_files
from tests.shards.real import picture

NASTY = "<script>alert('&')</script> \"quoted\" “curly” 🎄\nsecond line"


@pytest.fixture
def small(write: Write, tmp_path: Path) -> Path:
    """Three training pairs, two of them with one picture, and a test pair."""
    files = {"1.jpg": picture(1), "2.jpg": picture(1), "3.png": picture(3, "P"), "4.jpg": picture(4, "L")}
    rows = [
        row("1.jpg", ["a cat", "a cat sits here"]),
        row("2.jpg", "a cat"),
        row("3.png", "a " * 76),  # with the start and the end 78 tokens
        row("4.jpg", NASTY, split="test"),
    ]
    write(rows, files)
    return tmp_path / "out"


def test_counts_lengths_and_duplicates(small: Path) -> None:
    info = describe_set(small)
    train, test = info.splits["train"], info.splits["test"]
    assert (train.num_pairs, test.num_pairs) == (3, 1)
    assert train.words == [2, 4, 2, 76]
    assert train.tokens == [4, 6, 4, 78]
    assert (train.share_cut(77), train.share_cut(78), train.share_cut(248)) == (0.25, 0, 0)
    assert info.kinds == {"jpeg RGB": 2, "png P": 1, "jpeg L": 1}
    assert info.sizes == {(64, 64): 4}
    text = "\n".join(info.lines())
    assert "licence: that of your data" in text
    assert "train: 3 pairs, 4 captions\n  words: mean 21.0, median 3, 2 to 76\n" in text
    assert "tokens: mean 23.0, median 5, 4 to 78; 25.0% are cut at 77, 0.0% are cut at 248" in text
    assert text.endswith("duplicates: 1 picture that occurs before, 1 caption that occurs before")


def test_tokens_are_those_that_training_sees(small: Path) -> None:
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32", context_length=300)
    # Rows are padded with zeros behind the end token.
    assert describe_set(small).splits["test"].tokens == [int((tokenizer([NASTY]) != 0).sum())]


def test_published_sizes_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_set("urban1k", source=str(write_tree(tmp_path / "in", urban1k_files())), out=str(out))
    assert any(line.startswith("test: 4 pairs, 4 captions, of 1000 published") for line in describe_set(out).lines())


def test_what_is_no_set_is_named(tmp_path: Path) -> None:
    for function in (describe_set, lambda path: write_preview(path, tmp_path / "x.html", 1)):
        with pytest.raises(ValueError, match=r"holds no manifest\.json"):
            function(tmp_path)


def test_the_contact_sheet_escapes_captions_and_shows_thumbnails(small: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "small.html"
    assert write_preview(small, page, 4) == 3
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert html.escape(NASTY) in text
    assert "train <span>2 of 3 pairs</span>" in text
    assert "64 × 64 jpeg L" in text
    pictures = re.findall(r"data:image/jpeg;base64,([^\"]+)", text)
    assert [Image.open(io.BytesIO(base64.b64decode(data))).size for data in pictures] == [(64, 64)] * 3
    assert write_preview(small, page, 400) == 4


def test_the_contact_sheet_outlines_regions(tmp_path: Path) -> None:
    annotations, photos = dci_files()
    source = write_tree(tmp_path / "in", annotations)
    write_tree(source / "densely_captioned_images" / "photos", photos)
    write_set("dci", source=str(source), out=str(tmp_path / "out"))
    write_preview(tmp_path / "out", tmp_path / "page.html", 1)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    # [10, 20, 300, 400] of 40 x 30 pixels
    assert 'style="left:25.00%;top:66.67%;width:725.00%;height:1266.67%" title="tree: a tall green tree"' in text
    assert "2 regions" in text
