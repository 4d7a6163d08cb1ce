"""ShareGPT4V: 1,245,901 pictures of several data sets with machine captions, and the 1k test that Long-CLIP made of it.

    share-captioner_coco_lcs_sam_1246k_1107.json   one array of 1.5 GB: {"image": "coco/train2017/N.jpg",
                                                   "conversations": [{"from": "human", ...},
                                                                     {"from": "gpt", "value": caption}]}
    coco/, llava/, sam/, ...                       pictures, beside it or in IMAGES

As in Long-CLIP, the first 1000 rows are the test and the others the training set. The array is read row by row and
the pictures in portions, so memory stays small. Other files of the project (cap100k, mix665k) can be stated as SOURCE;
their rows without a picture are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from shards.names import path_id
from shards.pair import Entry, Item
from shards.sources.base import Reading, Request, Source, find_source, splits_option, wanted_splits
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in
from shards.sources.table import Row, stream_array
from shards.store import Store, open_store

NEEDS = (
    "share-captioner_coco_lcs_sam_1246k_1107.json (huggingface.co/datasets/Lin-Chen/ShareGPT4V) in data/sharegpt4v or "
    "stated as SOURCE, and coco/, llava/, sam/ and the others, unpacked, beside it or in the folder IMAGES"
)
LIST = "share-captioner_coco_lcs_sam_1246k_1107.json"
NUM_TEST = 1000
_PORTION = 1000
"""Rows held at a time."""


def read(request: Request) -> Reading:
    """Read row by row, and the pictures of a portion of rows at a time."""
    source = find_source(request, "sharegpt4v", NEEDS)
    path = source / LIST if source.is_dir() else source
    if not path.is_file():
        raise FileNotFoundError(f"{source} holds no {LIST}. sharegpt4v needs: {NEEDS}")
    pictures = request.images or source
    if not pictures.is_dir():
        raise ValueError(f"sharegpt4v reads pictures in portions, so IMAGES must be a folder. It needs: {NEEDS}")
    return Reading(_items(stream_array(path), wanted_splits(request), open_store(pictures)))


def _items(rows: Iterator[tuple[int, Row]], wanted: tuple[str, ...], pictures: Store) -> Iterator[Item]:
    test = iter(list(islice(rows, NUM_TEST)))
    for split, part in (("test", test), ("train", rows)):
        while split in wanted and (portion := list(islice(part, _PORTION))):
            yield from joined(pictures, make_drafts(portion, partial(_draft, split=split), "row"))


def _draft(row: dict[str, Any], split: str) -> Draft:
    image = name_in(row, "image")
    turns = row.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2 or not isinstance(turns[1], dict):
        raise ValueError("'conversations' has no second turn, which is the caption")
    return image, Entry(path_id(image), captions_in(turns[1], "value"), split, {"image": image})


SOURCE = Source(
    name="sharegpt4v",
    summary="ShareGPT4V: 1.2 million pictures with machine captions, and Long-CLIP's 1k test",
    licence="captions CC BY-NC 4.0; pictures under the licences of COCO, LAION/CC/SBU and SA-1B",
    needs=NEEDS,
    read=read,
    takes_images=True,
    published={"test": 1000, "train": 1_244_901},
    options={"splits": splits_option("train", "test")},
)
