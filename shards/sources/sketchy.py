"""Sketchy: fashion photographs with descriptions of each garment (LOTS); not the Sketchy database of Georgia Tech.

As LOTS publishes it:

    {train,test}_sketchy.json             {"images": [{"id", "file_name"}, ...],
                                           "annotations": [{"image_id", "category_name", "description"}, ...]}
    <split>/images/<id>/<file_name>       photographs; full_sketches/ and partial_sketches/ beside them are not read

The caption is what LOTS's own loader makes: the descriptions in lower case, joined by ". ", without shoes; photographs
of which nothing is left are not in the set. StructXLIP's packaging (Sketchy.json, sketchy_test.zip) is for
`structxlip-json`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from shards.pair import Entry, Rejected
from shards.sources.base import Reading, Request, Source, splits_option, wanted_splits
from shards.sources.files import Files
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in
from shards.sources.table import parse_json, rows_of

NEEDS = (
    "huggingface.co/datasets/federicogirella/sketchy as data/sketchy or SOURCE; for StructXLIP's package: pipeline "
    "shards write structxlip-json --source Sketchy.json --images sketchy_test.zip"
)


def read(request: Request) -> Reading:
    """Read the annotations of each split, then the photographs."""
    files = Files(request, "sketchy", NEEDS)
    drafts: list[Draft | Rejected] = []
    for split in wanted_splits(request):
        name, data = files.one(f"{split}_sketchy.json")
        drafts += _drafts(parse_json(data, name, "images", "annotations"), split)
    return joined(files.pictures(""), drafts)


def _drafts(content: dict[str, Any], split: str) -> list[Draft | Rejected]:
    garments: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def wear(annotation: dict[str, Any]) -> None:
        if annotation.get("category_name") != "shoe":
            garment = {
                "category": annotation.get("category_name"),
                "caption": captions_in(annotation, "description")[0],
            }
            garments[name_in(annotation, "image_id")].append(garment)

    def draft(image: dict[str, Any]) -> Draft | None:
        id = name_in(image, "id")
        worn = garments[id]
        caption = ". ".join(garment["caption"].strip().lower() for garment in worn)
        entry = Entry(id, [caption], split, {"garments": worn})
        return (f"{split}/images/{id}/{name_in(image, 'file_name')}", entry) if worn else None

    broken = make_drafts(rows_of(content["annotations"], "annotations"), wear, f"{split} annotation")
    return broken + make_drafts(rows_of(content["images"], "images"), draft, f"{split} image")


SOURCE = Source(
    name="sketchy",
    summary="Sketchy (LOTS): fashion photographs with a description of each garment",
    licence="not stated with the data; photographs from Fashionpedia and Flickr",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options={"splits": splits_option("train", "test")},
)
