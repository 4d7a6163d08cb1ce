"""Which file of a store is meant by the path that a caption file names.

Caption files carry the paths of their authors' machines, and archives add or drop leading folders. Three grades of
agreement, best first: the same path; one path ends with the other; only the last component is the same. Two candidates
of the same grade are never guessed between.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import PurePosixPath

Parts = tuple[str, ...]


class Grade(IntEnum):
    """How well a file's path agrees with a wanted one; smaller is better."""

    SAME = 0
    SUFFIX = 1
    BASENAME = 2


def split_path(path: str) -> Parts:
    """The components of a path without what differs between machines: root, drive, `.`, `..`, and how é is composed.

    >>> split_path("../DCI\\\\photos/sa_1.jpg")
    ('DCI', 'photos', 'sa_1.jpg')
    """
    parts = unicodedata.normalize("NFC", path).replace("\\", "/").split("/")
    return tuple(part for part in parts if part not in ("", ".", "..") and not (len(part) == 2 and part[1] == ":"))


def path_id(path: str) -> str:
    """A picture's path as an id: without its extension and without what differs between machines.

    >>> path_id("../coco/train2017/000000000009.jpg")
    'coco/train2017/000000000009'

    Raises:
        ValueError: The path has no last component.
    """
    parts = split_path(path)
    if not parts:
        raise ValueError(f"{path!r} is not the path of a file")
    *folders, name = parts
    return "/".join([*folders, name.rpartition(".")[0] or name])


def stem(path: str) -> str:
    """The last component of a path without its extension.

    >>> stem("../DCI/photos/sa_1543972.jpg")
    'sa_1543972'
    """
    return path_id(path).rpartition("/")[2]


def is_junk(path: str) -> bool:
    """Whether a file is something that macOS leaves in archives and folders."""
    parts = split_path(path)
    return not parts or "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


class Wanted:
    """The names that a caption file asks for, ready to be compared with the files of a store."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_basename: dict[str, list[tuple[str, Parts]]] = defaultdict(list)
        for name in dict.fromkeys(names):
            parts = split_path(name)
            if parts:
                self._by_basename[parts[-1]].append((name, parts))

    def match(self, member: str) -> list[tuple[str, Grade]]:
        """The wanted names that the file `member` may stand for, each with its grade."""
        parts = split_path(member)
        return [(name, _grade(parts, wanted)) for name, wanted in self._by_basename.get(parts[-1], ())] if parts else []


def _grade(member: Parts, wanted: Parts) -> Grade:
    if member == wanted:
        return Grade.SAME
    shorter = min(len(member), len(wanted))
    return Grade.SUFFIX if member[-shorter:] == wanted[-shorter:] else Grade.BASENAME


def resolve(wanted: Collection[str], members: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Find the file for each wanted name where every file of the store is known.

    Returns:
        The file of each name that has exactly one best candidate, and the candidates of each name that has several.
    """
    index = Wanted(wanted)
    best: dict[str, tuple[Grade, list[str]]] = {}
    for member in members:
        for name, grade in index.match(member):
            known = best.get(name)
            if known is None or grade < known[0]:
                best[name] = (grade, [member])
            elif grade == known[0] and member not in known[1]:
                known[1].append(member)
    found = {name: files[0] for name, (_, files) in best.items() if len(files) == 1}
    return found, {name: files for name, (_, files) in best.items() if len(files) > 1}


@dataclass(frozen=True, slots=True)
class NotFound:
    """Stands in for the bytes of a wanted file that a store cannot give."""

    reason: str


class Seen:
    """The files of a store, as much of them as a message names: a count and the first few."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.count = 0
        self.first: list[str] = []
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """One more file."""
        self.count += 1
        if self.count <= 3:
            self.first.append(name)


def not_found(candidates: Collection[str], where: object, seen: Seen) -> NotFound:
    """Say why a wanted name has no file, given the files that it may mean and what the store at `where` holds."""
    if candidates:
        return NotFound(f"ambiguous in {where}: it may be {' or '.join(sorted(candidates)[:3])}")
    examples = ", ".join(seen.first) or "nothing"
    more = ", ..." if seen.count > 3 else ""
    return NotFound(f"not in {where}, which holds {seen.count} files: {examples}{more}")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path ends like one of the patterns, such as `annotations/*.json`."""
    return any(PurePosixPath(name).match(pattern) for pattern in patterns)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which 2.jpg comes before 10.jpg."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name) if piece]
