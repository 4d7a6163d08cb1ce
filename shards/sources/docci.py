"""DOCCI (Descriptions of Connected and Contrasting Images): 14,847 photographs with long human descriptions.

    docci_descriptions.jsonlines   {"example_id", "split", "image_file", "description"} a line
    docci_images.tar.gz            unpacks to images/{train,test,qual_dev,qual_test}_NNNNN.jpg
    docci_metadata.jsonlines       optional: {"example_id", "cluster_id", "entity_tags", "distractors", ...} a line

The split `test5100` is the test of GOAL and StructXLIP: the 5000 of test and the 100 of qual_test.
"""

from __future__ import annotations

from typing import Any

from shards.pair import Entry
from shards.sources.base import Reading, Request, Source, splits_option, wanted_splits
from shards.sources.files import Files
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in, present, split_in
from shards.sources.table import parse_rows

HOME = "https://storage.googleapis.com/docci/data/"

NEEDS = (
    f"a connection, to stream from {HOME} (free) when neither SOURCE nor data/docci is there; or "
    "docci_descriptions.jsonlines and docci_images.tar.gz from there in data/docci or SOURCE, the tar unpacked or not, "
    "or as IMAGES; docci_metadata.jsonlines beside them adds clusters"
)
SPLITS = ("train", "test", "qual_dev", "qual_test")
EXTRAS = ("cluster_id", "entity_tags", "distractors")
"""Ready-made near-duplicates: `distractors` names four similar pictures of each of 1000 test pictures."""

_TEST5100 = {"test": "test5100", "qual_test": "test5100"}


def read(request: Request) -> Reading:
    """Read the descriptions (11 MB) and what the metadata add to them, then the pictures in one pass."""
    files = Files(request, "docci", NEEDS)
    pictures = files.pictures("images", "docci_images.tar.gz")
    written_as = _splits(wanted_splits(request))
    name, descriptions = files.main("docci_descriptions.jsonlines")
    extras = _extras(files)

    def draft(row: dict[str, Any]) -> Draft | None:
        split = written_as.get(split_in(row, SPLITS))
        id = name_in(row, "example_id")
        entry = Entry(id, captions_in(row, "description"), split or "", extras.get(id, {}))
        return (f"images/{name_in(row, 'image_file')}", entry) if split else None

    return joined(pictures, make_drafts(parse_rows(descriptions, name), draft))


def _splits(wanted: tuple[str, ...]) -> dict[str, str]:
    """By official split: the one that its pictures are written to."""
    if "test5100" not in wanted:
        return {split: split for split in wanted}
    twice = sorted(_TEST5100.keys() & set(wanted))
    if twice:
        raise ValueError(f"docci: test5100 holds the pictures of {twice[0]} too: write them as two sets")
    return _TEST5100 | {split: split for split in wanted if split != "test5100"}


def _extras(files: Files) -> dict[str, dict[str, Any]]:
    found = files.find("docci_metadata.jsonlines")
    rows = parse_rows(found[1], found[0]) if found else ()
    return {
        row["example_id"]: present(row, *EXTRAS) for _, row in rows if isinstance(row, dict) and "example_id" in row
    }


SOURCE = Source(
    name="docci",
    summary="DOCCI: 14,847 photographs with long human descriptions, many of them contrasting twins",
    licence="CC BY 4.0 (descriptions and photographs)",
    needs=NEEDS,
    read=read,
    takes_images=True,
    home=HOME,
    published={"train": 9647, "test": 5000, "qual_dev": 100, "qual_test": 100, "test5100": 5100},
    options={
        "splits": splits_option(*SPLITS, "test5100", default=",".join(SPLITS)),
    },
)
