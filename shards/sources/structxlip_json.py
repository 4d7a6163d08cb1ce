"""StructXLIP's JSON lists: GOAL's, with structure pictures, and with a packaged copy of each picture.

    test     [{"original_filename", "original_caption", "file_name"?}, ...]
    train    the same, "original_filename_structure"?, and "segment": GOAL's crops, each "filename_structure_cropped"?

`file_name` is the path inside the package's zip, where there is one; `original_filename` is one of the authors'
machines. Their loader puts a black picture in the place of a missing one: here it is missing. Insect, of which nothing
is released, would be a list of this form. See `shards.sources.goal_json`.
"""

from __future__ import annotations

from shards.sources.base import Reading, Request, Source
from shards.sources.goal_json import IMAGE_KEYS, list_options, read_lists

NEEDS = (
    "a list as SOURCE (train where its rows have segments, else test), or lists as OPTIONS='train=a.json test=b.json'; "
    "and IMAGES=folder, tar or zip with the pictures (huggingface.co/datasets/zanxii/StructXlip has both for its tests)"
)


def read(request: Request) -> Reading:
    """Read the lists, then the pictures in one pass."""
    return read_lists(request, "structxlip-json", NEEDS, ("file_name", *IMAGE_KEYS))


SOURCE = Source(
    name="structxlip-json",
    summary="pairs in StructXLIP's JSON lists: test, or train with segments, boxes and structure pictures",
    licence="that of the pictures and captions listed",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options=list_options(),
)
