"""Search results as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from export.serving.search import Hit
from shards.page import html_page

_STYLE = """
header, main { max-width: 1180px; margin: 0 auto; }
header p { margin: 4px 0 28px; color: var(--quiet); }
main { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.picture { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--page);
  border-bottom: 1px solid var(--line); }
figcaption { padding: 12px 16px 16px; }
.facts { display: flex; gap: 12px; align-items: baseline; justify-content: space-between; }
.rank { color: var(--accent); font-weight: 600; }
.score { color: var(--quiet); font-size: 14px; font-variant-numeric: tabular-nums; }
.caption { margin: 6px 0 8px; max-height: 9.8em; overflow-y: auto; overflow-wrap: anywhere; }
.id { color: var(--quiet); font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_CARD = """<figure>
<img class="picture" src="data:image/jpeg;base64,{picture}" alt="Result {rank}: {id}">
<figcaption>
<div class="facts"><span class="rank">{rank}</span><span class="score">cosine {score:.3f}</span></div>
<div class="caption"{scrollable}>{caption}</div>
<div class="id">{id}</div>
</figcaption>
</figure>"""

_LONG_CAPTION = 180  # characters; beyond it a card's caption may scroll, and then the keyboard must reach it


def write_sheet(hits: Sequence[Hit], query: str, path: str | Path) -> None:
    """Write the results of a search as an HTML page, pictures included.

    Args:
        hits: as `search` gives them.
        query: what was searched for, the page's title.
        path: the file; an existing one is overwritten.
    """
    number = "1 picture" if len(hits) == 1 else f"{len(hits)} pictures"
    cards = "\n".join(_card(hit) for hit in hits)
    summary = f"{number}, the nearest first" if hits else "no picture"
    page = html_page(query, summary, f"<main>\n{cards}\n</main>", _STYLE)
    Path(path).write_text(page, encoding="utf-8")


def _card(hit: Hit) -> str:
    return _CARD.format(
        picture=base64.b64encode(hit.thumbnail).decode("ascii"),
        rank=hit.rank,
        score=hit.score,
        caption=html.escape(hit.caption),
        scrollable=' tabindex="0"' if len(hit.caption) > _LONG_CAPTION else "",
        id=html.escape(hit.id),
    )
