"""Urban-1K: 1000 street scenes of Visual Genome with captions of about a hundred words, from Long-CLIP.

    Urban1k/image/N.jpg       N = 1..1000, not padded
    Urban1k/caption/N.txt     UTF-8; the caption is its first line

The zip unpacks to Urban1k/, on some machines to Urban1k/Urban1k/.
"""

from __future__ import annotations

import io

from shards.names import natural_key, stem
from shards.pair import Entry, Rejected
from shards.sources.base import Reading, Request, Source
from shards.sources.files import Files
from shards.sources.rows import Draft, joined

HOME = "https://huggingface.co/datasets/BeichenZhang/Urban1k/resolve/main/"

NEEDS = (
    f"a connection, to stream from {HOME} when neither SOURCE nor data/urban1k is there; or Urban1k.zip from there, "
    "unpacked or not, in data/urban1k or as SOURCE"
)

ARCHIVES = ("Urban1k.zip",)


def read(request: Request) -> Reading:
    """Read the thousand captions, then the pictures beside them."""
    files = Files(request, "urban1k", NEEDS, ARCHIVES)
    texts = sorted(files.all("caption/*.txt"), key=lambda file: natural_key(file[0]))
    return joined(files.pictures("", *ARCHIVES), [_draft(stem(path), data) for path, data in texts])


def _draft(id: str, text: bytes) -> Draft | Rejected:
    try:
        line = io.StringIO(text.decode("utf-8-sig"), newline=None).readline()
    except UnicodeDecodeError as error:
        return Rejected(id, f"its caption is not UTF-8: {error.reason} at byte {error.start}", "test")
    return f"image/{id}.jpg", Entry(id, [line.removesuffix("\n")], "test")


SOURCE = Source(
    name="urban1k",
    summary="Urban-1K: 1000 street scenes with captions of a hundred words",
    licence="not stated where it is hosted; pictures from Visual Genome",
    needs=NEEDS,
    read=read,
    takes_images=True,
    home=HOME,
    published={"test": 1000},
)
