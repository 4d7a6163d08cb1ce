"""A remote file that can be read from any place, in blocks that are kept for a while."""

from __future__ import annotations

import io
from collections.abc import Callable

BLOCK = 4 << 20
"""Bytes fetched at a time."""


class BlockFile(io.RawIOBase):
    """A seekable file over ranges of bytes. At most `num_blocks` blocks are in memory.

    Args:
        shown: The file as messages name it.
        fetch: Gives the bytes from `start` up to, not including, `end`.
        size: Of the file, in bytes.
        num_blocks: Blocks kept: two suffice for reading front to back; columns of a table are read side by side.
    """

    def __init__(self, shown: str, fetch: Callable[[int, int], bytes], size: int, num_blocks: int = 16) -> None:
        from fsspec.caching import BlockCache

        self._shown, self._fetch = shown, fetch
        self._size = size
        self._cache = BlockCache(BLOCK, self._checked, size, maxblocks=num_blocks)
        self._position = 0

    def _checked(self, start: int, end: int) -> bytes:
        end = min(end, self._size)
        data = self._fetch(start, end)
        if len(data) != end - start:
            raise OSError(f"{self._shown}: asked for {end - start} bytes from {start}, got {len(data)}; did it change?")
        return data

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the file, and give it."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as the current block reaches."""
        block_end = (self._position // BLOCK + 1) * BLOCK
        end = min(self._position + len(buffer), block_end, self._size)
        if end <= self._position:
            return 0
        data = self._cache._fetch(self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
