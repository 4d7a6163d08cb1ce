"""Where the files of a data set lie under SOURCE and IMAGES."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shards.location import can_list, is_there
from shards.sources.base import Request, announce, find_source
from shards.store import JoinedStore, Store, is_archive, open_store


class Files:
    """The files of one data set: its lists by their official names, its pictures where they are shipped or unpacked.

    SOURCE may be the folder that holds them, an archive of it, or the main list itself with the rest beside it.

    Args:
        request: What a user asked for.
        name: The data set's; it is looked for in the default places of that name.
        needs: What to say when something is not there.
        archives: Names of archives of lists as they are downloaded; in the folder, unopened, they do as well.

    Raises:
        FileNotFoundError: SOURCE, or every default place, is not there.
    """

    def __init__(self, request: Request, name: str, needs: str, archives: Sequence[str] = ()) -> None:
        self.name = name
        self.needs = needs
        self.root = find_source(request, name, needs)
        self._images = request.images
        self._main = self.root if self.root.is_file() and not is_archive(self.root) else None
        self._folder = self.root.parent if self._main else self.root
        self._stores = [open_store(self._folder)]
        if self._folder.is_dir():
            self._stores += [open_store(path) for name in archives if is_there(path := self._folder / name)]

    def main(self, pattern: str) -> tuple[str, bytes]:
        """Name and bytes of the data set's main list: SOURCE itself, whatever it is called, else `pattern` under it.

        Raises:
            ValueError: It is not there, or there are several.
        """
        if self._main:
            return str(self._main), self._main.read_bytes()
        return self.one(pattern)

    def one(self, pattern: str) -> tuple[str, bytes]:
        """Name and bytes of the only file whose path ends like `pattern`.

        Raises:
            ValueError: It is not there (names what was expected and what was found), or there are several.
        """
        found = self.find(pattern)
        if found is None:
            raise ValueError(self.lacks(pattern))
        return found

    def find(self, pattern: str) -> tuple[str, bytes] | None:
        """As `one`, but None where there is none."""
        found = list(self._matches(pattern))
        if len(found) > 1:
            paths = ", ".join(path for path, _ in found[:3])
            raise ValueError(
                f"{self._folder} holds {len(found)} files {pattern} ({paths}): point SOURCE at the one meant"
            )
        return (f"{self._folder}: {found[0][0]}", found[0][1]) if found else None

    def all(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of every file whose path ends like one of the patterns.

        Raises:
            ValueError: There is none; names what was expected and what was found.
        """
        files = self._matches(*patterns)
        first = next(files, None)
        if first is None:
            raise ValueError(self.lacks(" or ".join(patterns)))
        yield first
        yield from files

    def lacks(self, pattern: str) -> str:
        """The complaint that a list is not where it should be."""
        first = self._stores[0].first_names(4)
        there = ", ".join(first[:3]) + (", ..." if len(first) > 3 else "") if first else "nothing"
        if not can_list(self._folder):
            refusal = getattr(self._stores[0], "refusal", "")
            there = f"nothing of that name that can be read ({refusal or 'a web folder cannot be listed'})"
        return f"{self._folder} holds no {pattern}; it holds {there}. {self.name} needs: {self.needs}"

    def _matches(self, *patterns: str) -> Iterator[tuple[str, bytes]]:
        """The files that match in the first store that has any: an unpacked copy comes before its archive."""
        for store in self._stores:
            files = store.iter_files(*patterns)
            first = next(files, None)
            if first is not None:
                yield first
                yield from files
                return

    def pictures(self, *places: str) -> Store:
        """The pictures: in those of `places` that are there, under IMAGES, else under SOURCE; or anywhere in IMAGES.

        Raises:
            FileNotFoundError: Without IMAGES, none of the places is there; the message names them.
        """
        base = self._images or self._folder
        announce(self.name, self._images)
        if not base.is_dir():
            return open_store(base)
        # The names of pictures are known, so a web folder need not show its own: it is the last resort.
        shown = (base / place for place in places if place or can_list(base))
        there = [open_store(path) for path in shown if is_there(path)]
        if len(there) == 1:
            return there[0]
        if there:
            return JoinedStore(there)
        if self._images or not can_list(base):
            return open_store(base)
        expected = " or ".join(places)
        raise FileNotFoundError(
            f"the pictures of {self.name} are not in {base}: expected {expected} there, or IMAGES. "
            f"{self.name} needs: {self.needs}"
        )
