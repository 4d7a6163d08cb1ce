"""Search results as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from export.serving.search import Hit

_STYLE = """
:root { color-scheme: light dark; --page: #f5f5f3; --card: #fff; --text: #1d1d1b; --quiet: #6b6b66; --line: #e2e2dd;
  --accent: #2f6f5e; }
@media (prefers-color-scheme: dark) { :root { --page: #161716; --card: #212322; --text: #ecece8; --quiet: #a0a19b;
  --line: #343634; --accent: #7cc7b1; } }
* { box-sizing: border-box; }
body { margin: 0; padding: clamp(16px, 4vw, 48px); background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
header, main { max-width: 1180px; margin: 0 auto; }
h1 { margin: 0; font-size: clamp(22px, 3.2vw, 32px); line-height: 1.25; font-weight: 600; overflow-wrap: anywhere; }
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

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{query}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{query}</h1>
<p>{summary}</p>
</header>
<main>
{cards}
</main>
</body>
</html>
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
    page = _PAGE.format(
        query=html.escape(query),
        style=_STYLE,
        summary=f"{number}, the nearest first" if hits else "no picture",
        cards="\n".join(_card(hit) for hit in hits),
    )
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
