"""The receipt of a set, `manifest.json`: what was asked for, what came of it, and hashes of what was written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shards.contents import CONTENTS
from shards.index import INDEX
from shards.mds import ShardFormat
from shards.report import Report, Tally
from shards.sources.base import Source

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
KIND = "hn-clip shards"


@dataclass(frozen=True, slots=True)
class Receipt:
    """A parsed manifest. `content` is the JSON object as it was written."""

    content: dict[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """What was asked for. Sets from before there was a choice of formats have the default one."""
        return {"shards": ShardFormat().record(), **self.content["request"]}

    @property
    def part(self) -> dict[str, Any] | None:
        """Which share of the source this is, and its blocks; None for a whole set."""
        return self.content.get("part")

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """By split: counts, and size and sha256 of the index and of the list of contents."""
        return self.content["splits"]

    def report(self, out: str) -> Report:
        """The report of a set that is already there."""
        counts = self.content["counts"]
        written = {split: entry["written"] for split, entry in self.splits.items()}
        return Report(
            name=self.content["name"],
            out=out,
            wanted=counts["wanted"],
            written=written,
            rejected=counts["rejected"],
            missing=counts["missing"],
            empty_captions=counts["empty_captions"],
            bytes=counts["image_bytes"],
            seconds=0.0,
            already_there=True,
        )


def read_receipt(set_dir: Path) -> Receipt | None:
    """The receipt in a folder, or None where there is no manifest.

    Raises:
        ValueError: There is a manifest that this version cannot read.
    """
    path = set_dir / MANIFEST
    return parse_receipt(path.read_bytes(), str(path)) if path.is_file() else None


def parse_receipt(data: bytes, path: str) -> Receipt:
    """The receipt in a manifest's bytes; `path` names it in errors.

    Raises:
        ValueError: This version cannot read it.
    """
    try:
        content = json.loads(data)
        kind, number = content["kind"], content["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); write the set again") from error
    if kind != KIND or number != FORMAT_VERSION:
        raise ValueError(f"{path} is {kind!r} version {number}, not {KIND!r} version {FORMAT_VERSION}")
    return Receipt(content)


def write_receipt(
    set_dir: Path,
    source: Source,
    request: dict[str, Any],
    tally: Tally,
    part: dict[str, Any] | None,
    origin: dict[str, Any] | None,
) -> None:
    """Write the receipt of a finished set. It holds no time or host, so that equal inputs give equal bytes.

    `origin` is the address that was read where nobody stated a source.
    """
    splits = {}
    for split in sorted(tally.written):
        splits[split] = {
            "written": tally.written[split],
            "rejected": tally.rejected[split],
            "missing": tally.missing[split],
            "index": fingerprint(set_dir / split / INDEX),
            "contents": fingerprint(set_dir / split / CONTENTS),
        }
    content = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "name": source.name,
        "licence": source.licence,
        "request": request,
        "counts": {
            "wanted": tally.done,
            "written": tally.num_written,
            "rejected": tally.num_rejected,
            "missing": tally.num_missing,
            "empty_captions": tally.empty_captions,
            "image_bytes": tally.bytes,
        },
        "splits": splits,
        "versions": _versions(("hn-clip", "mosaicml-streaming", "pillow", *source.packages)),
    }
    more = {"part": part, "origin": origin}
    save_receipt(set_dir, content | {key: value for key, value in more.items() if value})


def save_receipt(set_dir: Path, content: dict[str, Any]) -> None:
    """Write a receipt's content."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (set_dir / MANIFEST).write_text(text, encoding="utf-8")


def format_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say in which respects the shards of two requests differ in form, or in the share that they are."""
    changes = []
    for key, before in old["shards"].items():
        if before != new["shards"][key]:
            changes.append(f"{key} was {before}, now {new['shards'][key]}")
    if old.get("part") != new.get("part"):
        shares = [f"part {part['number']} of {part['of']}" if part else "the whole" for part in map(_part, (old, new))]
        changes.append("it was {}, now {}".format(*shares))
    return "; ".join(changes)


def _part(request: dict[str, Any]) -> dict[str, Any] | None:
    return request.get("part")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # a source checkout that was never installed has no version to state
    return found
