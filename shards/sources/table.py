"""Rows of JSONL, JSON, CSV and TSV files, with the numbers that an editor would show."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any] | str
"""The columns of a row, or the reason why it cannot be read."""

LINES = (".jsonl", ".jsonlines", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row with its number: the line it starts on, or in a JSON array its place, from 1.

    Text is UTF-8, with or without a byte order mark.

    Raises:
        ValueError: An unknown extension, another encoding, or a file that is broken as a whole.
    """
    kind = path.suffix.lower()
    if kind not in (*LINES, ".json", *DELIMITERS):
        raise ValueError(f"{path} is none of {', '.join((*LINES, '.json', *DELIMITERS))}")
    try:
        with path.open(encoding="utf-8-sig", newline="" if kind in DELIMITERS else "\n") as file:
            if kind in DELIMITERS:
                yield from _delimited(file, DELIMITERS[kind], path)
            elif kind == ".json":
                yield from _array(file, path)
            else:
                yield from _lines(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error


def _delimited(file: IO[str], delimiter: str, path: Path) -> Iterator[tuple[int, Row]]:
    rows = csv.reader(file, delimiter=delimiter)
    try:
        header = next(rows, [])
        start = rows.line_num + 1
        for cells in rows:
            if cells:
                # A short row lacks its last columns; cells beyond the header have no name and say nothing.
                yield start, dict(zip(header, cells, strict=False))
            start = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}; is a quotation mark left open?") from error


def _lines(file: IO[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _object(line)


def _object(line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _array(file: IO[str], path: Path) -> Iterator[tuple[int, Row]]:
    try:
        rows = json.load(file)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a JSON {type(rows).__name__}, not an array of objects")
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"
