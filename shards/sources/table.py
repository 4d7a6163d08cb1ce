"""Rows of JSONL, JSON, CSV and TSV files, with the numbers that an editor would show."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any

from shards.location import Location, open_stream

Row = dict[str, Any] | str
"""The columns of a row, or the reason why it cannot be read."""

LINES = (".jsonl", ".jsonlines", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_rows(path: Location) -> Iterator[tuple[int, Row]]:
    """Yield each row with its number: the line it starts on, or in a JSON array its place, from 1.

    Text is UTF-8, with or without a byte order mark.

    Raises:
        ValueError: An unknown extension, another encoding, or a file that is broken as a whole.
    """
    with open_stream(path) as file:
        yield from _rows(file, path.name, str(path))


def parse_rows(data: bytes, name: str) -> Iterator[tuple[int, Row]]:
    """The same for the bytes of a file called `name`."""
    yield from _rows(io.BytesIO(data), name, name)


def stream_array(path: Location) -> Iterator[tuple[int, Row]]:
    """The same for a JSON array that is too large for memory: one row at a time is held."""
    import ijson

    with open_stream(path) as file:
        if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        if file.peek(1000)[:1000].lstrip()[:1] not in (b"[", b""):
            raise ValueError(f"{path} holds no JSON array of objects")
        try:
            for number, row in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield number, row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"
        except ijson.JSONError as error:
            raise ValueError(f"{path} is cut off or not JSON: {_first_line(error)}") from error


def parse_json(data: bytes, name: str, *keys: str) -> Any:
    """The JSON value in the bytes of a file called `name`; with `keys`, an object that has them.

    Raises:
        ValueError: It is not JSON, or no such object: the message names the keys that are there.
    """
    try:
        value = json.loads(data)  # a byte order mark is looked for in bytes, not in text
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if keys and not isinstance(value, dict):
        raise ValueError(f"{name} holds a JSON {type(value).__name__}, not an object with {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{name} has no {key!r}; it has {', '.join(value) or 'nothing'}")
    return value


def rows_of(value: Any, name: str) -> Iterator[tuple[int, Row]]:
    """The same for an array that has been parsed; `name` says where it was.

    Raises:
        ValueError: It is no array.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name} holds a JSON {type(value).__name__}, not an array of objects")
    for number, row in enumerate(value, start=1):
        yield number, row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def decode_text(data: bytes, name: str) -> str:
    """UTF-8, with or without a byte order mark.

    Raises:
        ValueError: Another encoding.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(name, error)) from error


def _rows(binary: IO[bytes], file_name: str, name: str) -> Iterator[tuple[int, Row]]:
    kind = PurePosixPath(file_name).suffix.lower()
    if kind not in (*LINES, ".json", *DELIMITERS):
        raise ValueError(f"{name} is none of {', '.join((*LINES, '.json', *DELIMITERS))}")
    file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="" if kind in DELIMITERS else "\n")
    try:
        if kind in DELIMITERS:
            yield from _delimited(file, DELIMITERS[kind], name)
        elif kind == ".json":
            yield from _array(file, name)
        else:
            yield from _lines(file)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(name, error)) from error


def _not_utf8(name: str, error: UnicodeDecodeError) -> str:
    return f"{name} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"


def _first_line(error: Exception) -> str:
    text = error.args[0] if error.args else ""
    return (text.decode(errors="replace") if isinstance(text, bytes) else str(text)).split("\n")[0]


def _delimited(file: IO[str], delimiter: str, name: str) -> Iterator[tuple[int, Row]]:
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
        raise ValueError(f"{name}, line {rows.line_num}: {error}; is a quotation mark left open?") from error


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


def _array(file: IO[str], name: str) -> Iterator[tuple[int, Row]]:
    try:
        rows = json.load(file)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    yield from rows_of(rows, name)
