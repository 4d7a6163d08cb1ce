"""The ids that have come by, in few bytes each: a set of a hundred million pairs has as many."""

from __future__ import annotations

from hashlib import blake2b

_SIZE = 16
"""Bytes of a digest. Among a hundred million ids, two of one digest have a chance of 2e-23."""

_FULL = 128
"""Digests that a bucket holds on average before there are twice as many buckets; they are searched one by one."""


class Ids:
    """A set that strings are added to. It takes about 17 bytes for each, whatever its length.

    Digests lie end to end in buckets; the first bytes of a digest say which. When the buckets are full each is split
    in two, one after the other, so that growing needs no second copy of all.
    """

    def __init__(self) -> None:
        self._buckets = [b""]
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, id: str) -> bool:
        digest = _digest(id)
        return _find(self._buckets[self._place(digest)], digest)

    def add(self, id: str) -> bool:
        """Add an id; whether it is new."""
        digest = _digest(id)
        place = self._place(digest)
        bucket = self._buckets[place]
        if _find(bucket, digest):
            return False
        self._buckets[place] = bucket + digest
        self._len += 1
        if self._len >= _FULL * len(self._buckets):
            self._split()
        return True

    def _place(self, digest: bytes) -> int:
        return int.from_bytes(digest[:8], "little") & (len(self._buckets) - 1)

    def _split(self) -> None:
        """Twice as many buckets: what was in bucket i goes to i, or to i + n for the n there were."""
        count = len(self._buckets)
        self._buckets += [b""] * count
        for number in range(count):
            low: list[bytes] = []
            high: list[bytes] = []
            bucket = self._buckets[number]
            for start in range(0, len(bucket), _SIZE):
                digest = bucket[start : start + _SIZE]
                (high if int.from_bytes(digest[:8], "little") & count else low).append(digest)
            self._buckets[number], self._buckets[number + count] = b"".join(low), b"".join(high)


def _digest(id: str) -> bytes:
    # What is no Unicode text is no id either, but it is somebody else's to say.
    return blake2b(id.encode("utf-8", "surrogatepass"), digest_size=_SIZE).digest()


def _find(bucket: bytes, digest: bytes) -> bool:
    """Whether a digest is one of those in a bucket, and not the end of one and the beginning of the next."""
    start = bucket.find(digest)
    while start % _SIZE and start > 0:
        start = bucket.find(digest, start + 1)
    return start >= 0
