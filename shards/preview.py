"""A contact sheet of a set: some of its pairs as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from shards.images import decode_rgb, image_facts
from shards.page import html_page
from shards.reader import ShardReader
from shards.receipt import MANIFEST, Receipt, read_receipt

THUMBNAIL = 480
"""The longer side of a picture on the page, in pixels."""

_MAX_REGIONS = 16  # outlines on one picture; more hide it

_STYLE = """
body { font-size: 15px; }
header, section { max-width: 1320px; margin: 0 auto; }
h2 { margin: 32px 0 12px; font-size: 18px; font-weight: 600; }
header p, h2 span { margin: 4px 0 0; color: var(--quiet); font-weight: 400; }
.cards { columns: 4 270px; column-gap: 18px; }
figure { margin: 0 0 18px; break-inside: avoid; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; overflow: hidden; }
.frame { position: relative; line-height: 0; background: #fff; border-bottom: 1px solid var(--line); }
.frame img { width: 100%; height: auto; }
.region { position: absolute; border: 2px solid #fff; border-radius: 3px; opacity: .8;
  box-shadow: 0 0 0 1px #0008, inset 0 0 0 1px #0008; }
.region:hover { opacity: 1; background: #fff3; }
figcaption { padding: 12px 16px 14px; }
.caption { margin: 0 0 8px; max-height: 15em; overflow-y: auto; scrollbar-width: thin;
  overflow-wrap: anywhere; white-space: pre-line; }
.caption + .caption { border-top: 1px dashed var(--line); padding-top: 8px; }
.facts { color: var(--quiet); font-size: 13px; }
.id { color: var(--accent); font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_CARD = """<figure>
<div class="frame"><img src="data:image/jpeg;base64,{picture}" alt="{id}">{regions}</div>
<figcaption>
{captions}
<div class="id">{id}</div>
<div class="facts">{facts}</div>
</figcaption>
</figure>"""


def write_preview(set_dir: Path, out: Path, count: int) -> int:
    """Write a page with about `count` pairs of a set, as many of each split, evenly spread over it.

    Returns:
        How many pairs are on the page.

    Raises:
        ValueError: The folder is no set, or is damaged.
    """
    receipt = read_receipt(set_dir)
    if receipt is None:
        raise ValueError(f"{set_dir} holds no {MANIFEST}: it is no shard set, or one that was not written by shards")
    each = -(-count // len(receipt.splits))
    sections, shown = [], 0
    for split in receipt.splits:
        reader = ShardReader(set_dir / split)
        cards = [_card(pair) for pair in _spread(reader, each)]
        shown += len(cards)
        heading = f"<h2>{html.escape(split)} <span>{len(cards)} of {len(reader)} pairs</span></h2>"
        body = "\n".join(cards)
        sections.append(f'<section>\n{heading}\n<div class="cards">\n{body}\n</div>\n</section>')
    page = html_page(set_dir.resolve().name, html.escape(_summary(receipt)), "\n".join(sections), _STYLE)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return shown


def _summary(receipt: Receipt) -> str:
    from shards.sources import SOURCES

    name = receipt.content["name"]
    what = SOURCES[name].summary if name in SOURCES else name
    return f"{what}. {receipt.content['counts']['written']} pairs. Licence: {receipt.content['licence']}."


def _spread(reader: ShardReader, count: int) -> Iterator[dict[str, Any]]:
    number = min(count, len(reader))
    return (reader[index * len(reader) // number] for index in range(number))


def _card(pair: dict[str, Any]) -> str:
    facts = image_facts(pair["image"])
    about = [f"{facts.width} × {facts.height} {facts.format} {facts.mode}", f"{len(pair['image']) / 1000:.0f} kB"]
    regions = pair["meta"].get("regions") or []
    if regions:
        about.append("1 region" if len(regions) == 1 else f"{len(regions)} regions")
    return _CARD.format(
        picture=_thumbnail(pair["image"]),
        id=html.escape(pair["id"]),
        regions="".join(_outline(region, facts.width, facts.height) for region in regions[:_MAX_REGIONS]),
        # A long caption scrolls, and the keyboard must reach it.
        captions="\n".join(f'<p class="caption" tabindex="0">{html.escape(text)}</p>' for text in pair["captions"]),
        facts=", ".join(about),
    )


def _thumbnail(data: bytes) -> str:
    picture = decode_rgb(data)
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _outline(region: dict[str, Any], width: int, height: int) -> str:
    """A region's box over the picture, with its caption for the pointer."""
    pixels = region.get("box")
    box = [pixels[0] / width, pixels[1] / height, pixels[2] / width, pixels[3] / height] if pixels else None
    left, top, right, bottom = box or region["relative_box"]
    place = f"left:{left:.2%};top:{top:.2%};width:{right - left:.2%};height:{bottom - top:.2%}"
    return f'<span class="region" style="{place}" title="{html.escape(region["caption"])}"></span>'
