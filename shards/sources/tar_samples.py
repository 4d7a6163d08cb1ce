"""Samples out of WebDataset tars, by the webdataset library, over streams of ours."""

from __future__ import annotations

import sys
import tarfile
import zlib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from shards.location import Location, open_stream

Sample = dict[str, Any]
"""The library's: `__key__`, `__url__`, and bytes by extension, in lower case."""


def read_samples(tar: Location) -> Iterator[Sample]:
    """The samples of a tar, plain or compressed, in its order; one is in memory at a time.

    Raises:
        ValueError: It is damaged or incomplete, or two files of a sample have one name.
        OSError: It is elsewhere and cannot be read.
    """
    library = _tariterators()
    with open_stream(tar) as stream:
        try:
            yield from library.group_by_keys(library.tar_file_expander([{"url": str(tar), "stream": stream}]))
        except (tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
            # The library appends streams and addresses to what an error says.
            said = str(error.args[0] if error.args else error).partition(" @ <")[0]
            if isinstance(error, OSError):
                raise type(error)(said) from error
            raise ValueError(f"{tar} is damaged or incomplete ({said}); fetch it again") from error


@cache
def _tariterators() -> ModuleType:
    """The part of the library that reads tars, without torch where nobody has asked for torch yet.

    torch takes half a gigabyte of memory, more than a million pairs do. The library has stand-ins for where it is not
    installed, so it is hidden for the import; whoever imports either module afterwards gets it whole.
    """
    if "torch" in sys.modules or "webdataset" in sys.modules:
        return import_module("webdataset.tariterators")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return import_module("webdataset.tariterators")
    finally:
        for name in [name for name in sys.modules if name == "torch" or name.partition(".")[0] == "webdataset"]:
            del sys.modules[name]
