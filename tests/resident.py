"""The most memory that this process has had resident."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The largest resident memory of this program so far, in bytes.

    Linux's `ru_maxrss` survives exec: in a child it is at least what the parent had, so the kernel's mark of the
    address space itself is read where there is one.
    """
    status = Path("/proc/self/status")
    mark = (
        re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE) if status.exists() else None
    )
    if mark is not None:
        return int(mark.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
