"""Rows of Parquet files, a few at a time, wherever the files lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shards.location import Location, open_seekable
from shards.remote.base import RemotePath

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_BATCH = 32
"""Rows, with their pictures, that are in memory at a time."""

_BUFFER = 1 << 20
"""Bytes of a column that are read at a time: without it, a column of a whole row group, with all its pictures."""

_ASKED = 64


@contextmanager
def open_parquet(place: Location) -> Iterator[ParquetFile]:
    """A Parquet file; what is wrong with it while it is open is an error that names it.

    Raises:
        ValueError: It is damaged, incomplete or not Parquet.
        OSError: It is elsewhere and cannot be read.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with open_seekable(place) as binary:
        try:
            with ParquetFile(binary, buffer_size=_BUFFER, pre_buffer=False) as file:
                yield file
        except (ArrowException, OSError) as error:
            if str(place) in str(error):
                raise  # what the connection has to say
            raise ValueError(f"{place} is damaged, incomplete or not Parquet ({error}); fetch it again") from error


def rows_in(file: ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of an open file with these of its columns, in order."""
    for batch in file.iter_batches(batch_size=_BATCH, columns=list(columns), use_threads=False):
        yield from batch.to_pylist()


def count_rows(places: Sequence[Location]) -> int | None:
    """Rows of all files together, from their ends; None where many files elsewhere would be asked for it."""
    if len(places) > _ASKED and isinstance(places[0], RemotePath):
        return None
    count = 0
    for place in places:
        with open_parquet(place) as file:
            count += file.metadata.num_rows
    return count
