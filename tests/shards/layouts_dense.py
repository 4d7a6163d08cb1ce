"""Imitations of the dense-caption sets, after the published descriptions of their formats: one quirk a row."""

from __future__ import annotations

import json
from typing import Any

from tests.shards.layouts import UNICODE_CAPTION
from tests.shards.real import caption, picture


def lines(rows: list[dict[str, Any]]) -> bytes:
    """JSON lines as bytes, characters unescaped."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


# DOCCI ---------------------------------------------------------------------------------------------------------------


def docci_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Descriptions and metadata, and the pictures as the tar holds them."""
    texts = {
        "train_00000": caption(0),
        "train_00001": UNICODE_CAPTION,  # characters beyond ASCII
        "test_00000": caption(1),  # has distractors
        "test_00001": caption(1).upper(),  # a near-twin of the one before
        "qual_dev_00000": caption(2),
        "qual_test_00000": caption(3),
    }
    described = [
        {"example_id": id, "split": id[:-6], "image_file": f"{id}.jpg", "description": text}
        for id, text in texts.items()
    ]
    metadata: list[dict[str, Any]] = [
        {"example_id": "train_00000", "cluster_id": 7, "entity_tags": ["dog"], "image_width": 64, "image_height": 64},
        {"example_id": "test_00000", "cluster_id": 8, "entity_tags": [], "dsg": [{"question": "Is it a dog?"}]}
        | {"distractors": ["test_00001.jpg", "train_00000.jpg", "train_00001.jpg", "qual_dev_00000.jpg"]},
        {"example_id": "test_99999", "cluster_id": 9},  # a row whose picture has no description
    ]
    lists = {"docci_descriptions.jsonlines": lines(described), "docci_metadata.jsonlines": lines(metadata)}
    return lists, {f"images/{id}.jpg": picture(number) for number, id in enumerate(texts)}


def docci_aar_files() -> dict[str, bytes]:
    """The other tar of DOCCI, whose pictures have no descriptions: easily taken for the first."""
    return {f"images_aar/aar_test_0460{number}.jpg": picture(number + 20) for number in range(3)}


# Urban-1K ------------------------------------------------------------------------------------------------------------


def urban1k_files(root: str = "Urban1k") -> dict[str, bytes]:
    """Five of the thousand, as the zip unpacks."""
    texts = {
        "1": caption(4).encode(),
        "2": "A façade — with a ♥, l’été.\n".encode(),  # UTF-8 beyond ASCII, a line end
        "3": b"The first line.\nA second line that Long-CLIP's loader never reads.\n",
        "10": b"\xef\xbb\xbfA byte order mark.\r\n",  # Windows
        "11": b"caf\xe9",  # another encoding
    }
    files = {f"{root}/caption/{id}.txt": text for id, text in texts.items()}
    files |= {f"{root}/image/{id}.jpg": picture(int(id)) for id in texts}
    files[f"__MACOSX/{root}/caption/._1.txt"] = b"\x00\x05\x16\x07"  # what macOS leaves in zips
    files[f"{root}/caption/.DS_Store"] = b"\x00"
    return files


# Visual Genome paragraphs --------------------------------------------------------------------------------------------


def vg_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Paragraphs and splits, and the pictures of the two folders."""
    url = "https://cs.stanford.edu/people/rak248/VG_100K{}/{}.jpg"
    rows: list[dict[str, Any]] = [
        {"url": url.format("", 10), "image_id": 10, "paragraph": caption(5)},
        {"url": url.format("_2", 2388350), "image_id": 2388350, "paragraph": " A leading  and a double space."},
        {"url": url.format("", 10), "image_id": 10, "paragraph": caption(6)},  # a second paragraph of one picture
        {"url": url.format("_2", 12), "image_id": 12, "paragraph": caption(7)},  # in no split
        {"image_id": 13, "paragraph": caption(8)},  # no url
        {"url": url.format("", 14), "image_id": 14, "paragraph": " \n"},  # blank
        {"url": url.format("", 15), "image_id": 15},  # no paragraph
    ]
    lists = {"paragraphs_v1.json": json.dumps(rows).encode()}
    for split, ids in {"train": [10, 14, 15], "val": [13], "test": [2388350]}.items():
        lists[f"{split}_split.json"] = json.dumps(ids).encode()
    pictures = {f"VG_100K/{id}.jpg": picture(id) for id in (10, 13, 14, 15)}
    pictures |= {"VG_100K_2/12.jpg": picture(12), "VG_100K_2/2388350.jpg": picture(16)}
    return lists, pictures


# GOAL and StructXLIP -------------------------------------------------------------------------------------------------


def goal_box(left: int, top: int, right: int, bottom: int) -> dict[str, int]:
    """`bbox_coordinates` as both write them."""
    return {"x1": left, "y1": top, "x2": right, "y2": bottom, "width": right - left, "height": bottom - top}


def goal_test() -> list[dict[str, Any]]:
    """A test list with the author's paths; the last picture has two captions, as in SOREC."""
    photos = "../DCI/dataset/densely_captioned_images/photos"
    return [
        {"filename": f"{photos}/sa_1.jpg", "caption": caption(9)},
        {"filename": f"{photos}/sa_2.jpg", "caption": UNICODE_CAPTION},
        {"filename": f"{photos}/sa_3.jpg", "caption": "It appears to be nighttime."},
        {"filename": f"{photos}/sa_3.jpg", "caption": caption(10)},
    ]


def goal_train() -> list[dict[str, Any]]:
    """A training list: a picture with two crops, one without, one whose crop has no box."""

    def crop(id: str, number: int, **more: Any) -> dict[str, Any]:
        file = f"../pipline/segment/{id}.jpg_results/{id}_max_{number}.png"
        return {"similarity_score": 28.5, "filename": file, "caption": f"crop {number}", **more}

    first = [
        crop("sa_4", 1, bbox_coordinates=goal_box(0, 0, 32, 64)),
        crop("sa_4", 2, bbox_coordinates=goal_box(8, 8, 9, 9)),
    ]
    return [
        {"original_filename": "/home/a/photos/sa_4.jpg", "original_caption": caption(11), "segment": first},
        {"original_filename": "/home/a/photos/sa_5.jpg", "original_caption": caption(12), "segment": []},
        {"original_filename": "/home/a/photos/sa_6.jpg", "original_caption": "x", "segment": [crop("sa_6", 1)]},
    ]


def structxlip_train() -> list[dict[str, Any]]:
    """The same with structure pictures."""
    rows = goal_train()[:1]
    rows[0]["original_filename_structure"] = "/home/a/canny/sa_4.png"
    rows[0]["segment"][0]["filename_structure_cropped"] = "/home/a/canny/sa_4_max_1.png"
    return rows


def structxlip_test() -> list[dict[str, Any]]:
    """Sketchy as packaged: `file_name` is the path in the zip, `original_filename` one of the author's machine."""
    return [
        {
            "file_name": "LOST/test/global/1.jpg",
            "original_filename": "/mnt/other/x1.jpg",
            "original_caption": caption(13),
        },
        {"file_name": "OtherDatasets/2.jpg", "original_filename": "/mnt/other/x2.jpg", "original_caption": caption(14)},
    ]
