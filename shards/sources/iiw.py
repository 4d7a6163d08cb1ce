"""ImageInWords: the densest human captions there are, for pictures of other data sets.

datasets/<part>/data.jsonl     of github.com/google/imageinwords; rows differ in their keys, and some keys hold a "/"

part           rows   captions                                  pictures
IIW-400         400   "IIW", objects with boxes                 DOCCI's docci_images_aar.tar.gz, "image/key" + .jpg
DCI_Test        112   "IIW"                                     SA-1B's sa_000138.tar, "image"
DOCCI_Test      100   "IIW", and DOCCI's own as "DOCCI"         DOCCI's docci_images.tar.gz, "image" + .jpg
CM_3600        1000   "IIW-P5B" (a machine's)                   Open Images, "image/key" + .jpg
LocNar_Eval    1000   "IIW-P5B"                                 Open Images, "image/key" + .jpg
"""

from __future__ import annotations

from typing import Any

from shards.names import stem
from shards.pair import Entry
from shards.sources.base import Option, Reading, Request, Source
from shards.sources.files import Files
from shards.sources.rows import Draft, captions_in, joined, make_drafts, name_in
from shards.sources.table import parse_rows

NEEDS = (
    "datasets/ of github.com/google/imageinwords (free) as data/iiw or SOURCE, or one of its data.jsonl as SOURCE; and "
    "as IMAGES the part's pictures: docci_images_aar.tar.gz (IIW-400), docci_images.tar.gz (DOCCI_Test), sa_000138.tar "
    "(DCI_Test), or Open Images (the others)"
)
_IMAGE_KEYS = {"IIW-400": "image/key", "CM_3600": "image/key", "LocNar_Eval": "image/key"}
_MACHINE = ("CM_3600", "LocNar_Eval")


def read(request: Request) -> Reading:
    """Read the captions of one part, then its pictures."""
    files = Files(request, "iiw", NEEDS)
    part = request.options["part"]
    name, data = files.main(f"{part}/data.jsonl")
    if request.images is None:
        raise ValueError(f"iiw has captions only. It needs: {NEEDS}")
    both = request.options["captions"] == "all"

    def draft(row: dict[str, Any]) -> Draft:
        image = name_in(row, _IMAGE_KEYS.get(part, "image"))
        captions = captions_in(row, "IIW-P5B" if part in _MACHINE else "IIW")
        if both and "DOCCI" in row:
            captions = captions + captions_in(row, "DOCCI")
        meta = {"regions": [_region(thing) for thing in row["objects"]]} if "objects" in row else {}
        # stem() would cut an Open Images id at a dot, but those ids hold none.
        return (image if image.endswith(".jpg") else f"{image}.jpg"), Entry(stem(image), captions, "test", meta)

    return joined(files.pictures(), make_drafts(parse_rows(data, name), draft))


def _region(thing: dict[str, Any]) -> dict[str, Any]:
    """A described thing. Its box is text in the file, (top, left, bottom, right) on a scale of 0 to 999; here it is
    [left, top, right, bottom] as parts of the picture's width and height."""
    top, left, bottom, right = (int(edge) / 999 for edge in thing["normalized_coords"])
    return {"caption": thing["description"], "label": thing["label"], "relative_box": [left, top, right, bottom]}


SOURCE = Source(
    name="iiw",
    summary="ImageInWords: human captions of two hundred words for pictures of DOCCI, DCI and Open Images",
    licence="CC BY 4.0 (captions); pictures under their data sets' licences",
    needs=NEEDS,
    read=read,
    takes_images=True,
    options={
        "part": Option("IIW-400", "which part", ("IIW-400", "DCI_Test", "DOCCI_Test", "CM_3600", "LocNar_Eval")),
        "captions": Option("one", "all adds DOCCI's own caption to that of DOCCI_Test", ("one", "all")),
    },
)
