"""Long-DCI: every photograph of DCI that has an extra_caption (7602 of 7805), as one retrieval test.

It holds DCI's training photographs: who has trained on DCI evaluates on it with `without_dci_train=yes`.
The layout on disk is DCI's: see `shards.sources.dci`.
"""

from __future__ import annotations

from shards.sources import dci
from shards.sources.base import Option, Reading, Request, Source
from shards.sources.files import Files
from shards.sources.rows import joined

NEEDS = f"what dci needs: {dci.NEEDS}"


def read(request: Request) -> Reading:
    """Read every annotation, then the photographs in one pass."""
    files = Files(request, "dci", NEEDS, dci.ARCHIVES)
    photos = dci.photo_store(files)
    splits, annotations = dci.read_annotations(files)
    if request.options["without_dci_train"] == "yes":
        annotations = {file: words for file, words in annotations.items() if splits.get(file) != "train"}
    return joined(photos, [dci.draft(file, words, "test", "extra") for file, words in sorted(annotations.items())])


SOURCE = Source(
    name="long-dci",
    summary="all of DCI with a long caption, as one test of 7602 photographs",
    licence=dci.SOURCE.licence,
    needs=NEEDS,
    read=read,
    takes_images=True,
    published={"test": 7602},
    options={
        "without_dci_train": Option("no", "whether DCI's own training photographs are left out", ("yes", "no")),
    },
)
