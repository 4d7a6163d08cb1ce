from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.resident import peak_resident_bytes

_CHILD = """
from tests.resident import peak_resident_bytes
before = peak_resident_bytes()
block = bytearray(b"x") * 100_000_000
del block
print(before, peak_resident_bytes())
"""


def test_a_child_is_measured_without_what_its_parent_had() -> None:
    block = bytearray(b"x") * 400_000_000
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, cwd=here)
    assert len(block) <= peak_resident_bytes()
    before, after = map(int, done.stdout.split())
    assert before < 60e6
    assert 100e6 <= after < 160e6
