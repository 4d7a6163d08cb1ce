"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.fixtures import write_tiny_set
from tests.ranks import Ranks
from tests.wheel import Installed, build_wheel, install_wheel


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """What a test, or the code under it, sets in the environment (a rank's variables) ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(W).run(function, *args)` runs a function on W real ranks, which live as long as the session."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real set of shards: OpenMoji pictures, 64 train, 24 val and 24 test pairs. Read it, do not change it."""
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed away from the checkout, with an empty folder to work in."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installed"))
