"""One HTML page that needs nothing but itself: the frame of the contact sheet and of the sheet of search results."""

from __future__ import annotations

import html

_STYLE = """
:root { color-scheme: light dark; --page: #f5f5f3; --card: #fff; --text: #1d1d1b; --quiet: #6b6b66; --line: #e2e2dd;
  --accent: #2f6f5e; }
@media (prefers-color-scheme: dark) { :root { --page: #161716; --card: #212322; --text: #ecece8; --quiet: #a0a19b;
  --line: #343634; --accent: #7cc7b1; } }
* { box-sizing: border-box; }
body { margin: 0; padding: clamp(16px, 4vw, 48px); background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: clamp(22px, 3.2vw, 32px); line-height: 1.25; font-weight: 600; overflow-wrap: anywhere; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{summary}</p>
</header>
{body}
</body>
</html>
"""


def html_page(title: str, summary: str, body: str, style: str) -> str:
    """The page, light or dark as the reader's screen is.

    Args:
        title: of the page and its heading; escaped here.
        summary: HTML below the heading.
        body: HTML, what is in it already escaped.
        style: CSS, after that of the frame.
    """
    return _PAGE.format(title=html.escape(title), summary=summary, body=body, style=_STYLE + style)
