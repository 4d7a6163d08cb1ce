"""Parts of a set, written anywhere, put together to the whole set. Shards stay as they are."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from shards.contents import CONTENTS, read_contents
from shards.ids import Ids
from shards.index import INDEX, read_index
from shards.mds import ClosedShard, index_bytes, shard_name
from shards.mirror import fetched, home_of
from shards.output import open_work
from shards.parts import Part
from shards.reader import resolve_set
from shards.receipt import MANIFEST, Receipt, fingerprint, read_receipt, save_receipt
from shards.report import Report
from shards.stopped import saying_what_is_kept
from shards.work import Work, written_before

_NOTES = ("rejected.jsonl", "missing.jsonl")


def merge_parts(out: str, parts: Sequence[str], overwrite: bool = False, allow_missing: int | None = None) -> Report:
    """Write the set that parts are the shares of: the pairs of the source, in its order.

    Args:
        out: Folder or object store of the whole set. A shard is linked there where the file system can, or copied
            within the store that it lies in, or it comes by this machine.
        parts: Places of all parts, in any order.
        overwrite: Whether a set that is there, made by another request, is replaced.
        allow_missing: How many pictures may be missing from all parts together; by default as many as each allowed.

    Raises:
        ValueError: A part is missing, is there twice, or belongs to another request or another state of the source; an
            id occurs in two of them; `out` holds something else.
        OSError: Reading or writing failed; the message says what is kept.
        Stopped: Ctrl-C.
    """
    start = time.perf_counter()
    found = sorted((_Part.open(part) for part in parts), key=lambda part: part.number)
    _check(found)
    first = found[0].receipt.content
    asked = {"name": first["name"], "request": _without_part(found[0].receipt)}
    # Closed shards of a plain write, or of a merge of other parts, are not those that this one would put there.
    journal = asked | {"merged": [fingerprint(part.folder / MANIFEST) for part in found]}
    work = open_work(out)
    missing = sum(part.receipt.content["counts"]["missing"] for part in found)
    if allow_missing is not None and missing > allow_missing:
        raise ValueError(
            f"the parts lack {missing} pictures, {allow_missing} may be missing: --allow-missing {missing}"
        )
    report = written_before(work, asked, overwrite, allow_missing=missing)
    if report is not None and not work.is_left():
        return report
    with saying_what_is_kept(work), work.held():
        report = written_before(work, asked, overwrite, allow_missing=missing)
        if report is not None:
            work.tidy(journal)
            return report
        work.begin(journal)
        content = _merge(found, work)
        save_receipt(work.folder, content)
        work.publish()
    merged = Receipt(content).report(work.where)
    return replace(merged, already_there=False, seconds=time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part, its place on this machine, and its receipt."""

    where: str
    folder: Path
    receipt: Receipt

    @classmethod
    def open(cls, where: str) -> _Part:
        folder = resolve_set(where)
        receipt = read_receipt(folder)
        if receipt is None or receipt.part is None:
            raise ValueError(f"{where} is no part of a set: write it with pipeline shards write --part I/N")
        return cls(where, folder, receipt)

    @property
    def facts(self) -> dict[str, Any]:
        facts = self.receipt.part
        assert facts is not None
        return facts

    @property
    def number(self) -> int:
        return int(self.facts["number"])


def _without_part(receipt: Receipt) -> dict[str, Any]:
    return {key: value for key, value in receipt.request.items() if key != "part"}


def _check(parts: Sequence[_Part]) -> None:
    """All parts of one request, each once, of one state of the source."""
    first = parts[0]
    name, request, of = first.receipt.content["name"], _without_part(first.receipt), int(first.facts["of"])
    for part in parts:
        if (part.receipt.content["name"], _without_part(part.receipt), part.facts["of"]) != (name, request, of):
            raise ValueError(f"{part.where} and {first.where} belong to different requests")
        for what in ("items", "pieces"):
            if part.facts[what] != first.facts[what]:
                raise ValueError(
                    f"the source had {part.facts[what]} {what} when {part.where} was written and "
                    f"{first.facts[what]} for {first.where}: write one of them again"
                )
    numbers = [part.number for part in parts]
    for number, count in Counter(numbers).items():
        if count > 1:
            places = " and ".join(part.where for part in parts if part.number == number)
            raise ValueError(f"{places} are both {Part(number, of)}: each part is merged once")
    absent = sorted({*range(1, of + 1)} - {*numbers})
    if absent:
        named = ", ".join(str(Part(number, of)) for number in absent)
        raise ValueError(f"{named} of {name} missing: write it, and state the place of every part")
    if not any(part.receipt.splits for part in parts):
        raise ValueError(f"not one pair is in the parts of {name}: see the rejected.jsonl of each")
    items = sum(part.receipt.content["counts"]["wanted"] for part in parts)
    if first.facts["items"] not in (None, items):
        raise ValueError(f"the parts hold {items} items, the source had {first.facts['items']}: write the parts again")


def _merge(parts: Sequence[_Part], work: Work) -> dict[str, Any]:
    """Put shards, contents and notes where `work` wants them; the content of the receipt."""
    ids = Ids()
    splits: dict[str, Any] = {}
    for split in sorted({split for part in parts for split in part.receipt.splits}):
        done = len(work.closed.get(split, ()))
        for number, (part, spec, contents) in enumerate(_in_order(parts, split)):
            _check_ids(ids, parts, contents)
            if number >= done:
                _store(work, ClosedShard(split, _renumbered(spec, number), [], contents), part.folder / split, spec)
        (work.folder / split / INDEX).write_bytes(index_bytes(work.closed[split]))
        entries = [part.receipt.splits[split] for part in parts if split in part.receipt.splits]
        counts = {key: sum(entry[key] for entry in entries) for key in ("written", "rejected", "missing")}
        hashes = {
            "index": fingerprint(work.folder / split / INDEX),
            "contents": fingerprint(work.folder / split / CONTENTS),
        }
        splits[split] = counts | hashes
    for note in _NOTES:
        notes = [path for part in parts if (path := part.folder / note).is_file()]
        if notes:
            with (work.folder / note).open("wb") as file:
                for path in notes:
                    with path.open("rb") as lines:
                        shutil.copyfileobj(lines, file)
    content = {key: value for key, value in parts[0].receipt.content.items() if key != "part"}
    counts = Counter[str]()
    for part in parts:
        counts.update(part.receipt.content["counts"])
    keys = parts[0].receipt.content["counts"]
    whole = {"request": _without_part(parts[0].receipt), "counts": {key: counts[key] for key in keys}, "splits": splits}
    return content | whole


def _in_order(parts: Sequence[_Part], split: str) -> Iterator[tuple[_Part, dict[str, Any], bytes]]:
    """The shards of a split with their lines of the contents, block by block of the source."""
    shards = {part.number: _shards(part, split) for part in parts}
    for block in range(max(len(part.facts["blocks"]) for part in parts)):
        for part in parts:
            left = part.facts["blocks"][block].get(split, 0) if block < len(part.facts["blocks"]) else 0
            while left > 0:
                spec, contents = next(shards[part.number])
                left -= spec["samples"]
                yield part, spec, contents
            assert left == 0, "a shard holds pairs of one block"


def _shards(part: _Part, split: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    if split not in part.receipt.splits:
        return
    lines: IO[bytes]
    with (part.folder / split / CONTENTS).open("rb") as lines:
        for shard in read_index(part.folder / split):
            yield shard.spec, b"".join(islice(lines, shard.samples))


def _store(work: Work, shard: ClosedShard, split_dir: Path, spec: dict[str, Any]) -> None:
    """Put a shard of a part where `work` wants it."""
    place = home_of(split_dir, spec)
    if place is not None and work.can_copy(place):
        work.store(shard, place)
        return
    with fetched(split_dir, spec) as path:
        work.store(shard, path)


def _check_ids(ids: Ids, parts: Sequence[_Part], contents: bytes) -> None:
    for line in contents.splitlines():
        id = json.loads(line)["id"]
        if not ids.add(id):
            places = " and in ".join(_places(parts, id))
            raise ValueError(f"the id {id!r} is in {places}: give pairs other ids")


def _places(parts: Sequence[_Part], id: str) -> Iterator[str]:
    """The parts that hold an id, each as often as it does."""
    for part in parts:
        for split in part.receipt.splits:
            yield from (part.where for pair in read_contents(part.folder / split) or () if pair.id == id)


def _renumbered(spec: dict[str, Any], number: int) -> dict[str, Any]:
    def named(facts: dict[str, Any] | None) -> dict[str, Any] | None:
        if facts is None:
            return None
        return {**facts, "basename": shard_name(number, facts["basename"].split(".", 2)[2])}

    return {**spec, "raw_data": named(spec["raw_data"]), "zip_data": named(spec["zip_data"])}
