"""COCO captions: photographs with five short captions or a few more, by Karpathy's list or by COCO's own.

    dataset_coco.json                             Karpathy: splits train, restval, val, test
    annotations/captions_{train,val}2017.json     COCO's own: {"images": [{"id", "file_name"}, ...],
                                                  "annotations": [{"image_id", "caption"}, ...]}
    train2014/, val2014/, train2017/, val2017/    photographs, or the zips of those names unopened

Karpathy's 113,287 training photographs are train and restval together: `restval=train`. 000000320612.jpg is a PNG.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from shards.pair import Entry
from shards.sources import karpathy
from shards.sources.base import Option, Reading, Request, Source, splits_option, wanted_splits
from shards.sources.files import Files
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in, split_in
from shards.sources.table import Row, parse_json, rows_of

NEEDS = (
    f"dataset_coco.json, {karpathy.NEEDS}, or COCO's annotations, and the folders or zips of its photographs "
    "(http://images.cocodataset.org/zips/{train,val}{2014,2017}.zip, free), in data/coco or SOURCE, or those as IMAGES"
)

ARCHIVES = ("caption_datasets.zip", "annotations_trainval2014.zip", "annotations_trainval2017.zip")
SPLITS = ("train", "restval", "val", "test")


def read(request: Request) -> Reading:
    """Read the list, then the photographs in one pass."""
    files = Files(request, "coco", NEEDS, ARCHIVES)
    folders = [f"{part}{year}" for year in (2014, 2017) for part in ("train", "val")]
    pictures = files.pictures(*folders, *(f"{folder}.zip" for folder in folders))
    limit = None if request.options["captions"] == "all" else int(request.options["captions"])
    wanted = wanted_splits(request)
    join_restval = request.options["restval"] == "train"

    def draft(image: dict[str, Any]) -> Draft | None:
        split = split_in(image, SPLITS)
        entry = Entry(
            id=name_in(image, "cocoid"),
            captions=karpathy.sentences(image)[:limit],
            split="train" if split == "restval" and join_restval else split,
        )
        return (f"{name_in(image, 'filepath')}/{name_in(image, 'filename')}", entry) if split in wanted else None

    rows = _own_rows(files, request) if request.options["list"] == "coco" else _karpathy_rows(files)
    return joined(pictures, make_drafts(rows, draft, "image"))


def _karpathy_rows(files: Files) -> Iterator[tuple[int, Row]]:
    return karpathy.karpathy_rows(*files.main("dataset_coco.json"))


def _own_rows(files: Files, request: Request) -> Iterator[tuple[int, Row]]:
    """COCO's own lists of the years 2014 or 2017, in the form of Karpathy's."""
    if not {"train", "val"} & set(wanted_splits(request)):
        raise ValueError(
            "coco: COCO's own lists have captions of train and val only; Karpathy's have a test: list=karpathy"
        )
    for split in ("train", "val"):
        if split in wanted_splits(request):
            folder = f"{split}{request.options['year']}"
            name, data = files.one(f"captions_{folder}.json")
            content = parse_json(data, name, "images", "annotations")
            sentences: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for number, annotation in rows_of(content["annotations"], name):
                try:
                    if isinstance(annotation, str):
                        raise ValueError(annotation)
                    sentences[name_in(annotation, "image_id")].append({"raw": captions_in(annotation, "caption")[0]})
                except ValueError as error:
                    yield number, f"annotation: {error}"
            for number, image in rows_of(content["images"], name):
                if isinstance(image, str):
                    yield number, image
                else:
                    own = {"cocoid": image.get("id"), "filename": image.get("file_name"), "filepath": folder}
                    yield number, {**own, "split": split, "sentences": sentences[str(image.get("id"))]}


SOURCE = Source(
    name="coco",
    summary="COCO captions: 123,287 photographs with five short captions each",
    licence="captions CC BY 4.0; photographs from Flickr under their own licences",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options={
        "list": Option("karpathy", "whose list of splits and captions", ("karpathy", "coco")),
        "splits": splits_option(*SPLITS),
        "restval": Option("restval", "split that Karpathy's restval is written to", ("restval", "train")),
        "year": Option("2017", "the year of COCO's own lists", ("2014", "2017")),
        "captions": Option("all", "captions of a photograph that are kept", ("all", "5")),
    },
)
