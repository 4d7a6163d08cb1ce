"""Parts on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.on_ray import write_on_ray
from shards.parts import Part
from shards.verify import verify_set
from shards.writer import write_set
from tests.shards.resume import OPTIONS, SMALL, leftovers, make_source
from tests.shards.test_parts import samples

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with a CPU each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # before anything of Ray starts
        from ray.cluster_utils import Cluster

        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        started.add_node(num_cpus=1)
        started.wait_for_nodes()
        patch.setenv("RAY_ADDRESS", started.address)
        yield started.address
        started.shutdown()


def test_the_set_is_that_of_one_process(cluster: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    arguments = {"options": OPTIONS, "format": SMALL, "source": source["source"]}
    whole = write_set("pairs", out=str(tmp_path / "whole"), **arguments)  # type: ignore[arg-type]
    said: list[str] = []
    report = write_on_ray("pairs", out=str(tmp_path / "out"), say=said.append, **arguments)
    assert report.written == whole.written
    assert sorted(line.split(":")[0] for line in said) == ["part 1 of 2", "part 2 of 2"]
    assert samples(tmp_path / "out") == samples(tmp_path / "whole")
    assert verify_set(tmp_path / "out").ok
    assert write_on_ray("pairs", out=str(tmp_path / "out"), **arguments).already_there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]
    assert leftovers(tmp_path / "out") == []


def test_what_is_wrong_with_a_part_is_said_and_the_others_are_kept(cluster: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    (tmp_path / "in" / "001.jpg").unlink()
    arguments = {"options": OPTIONS, "format": SMALL, "source": source["source"], "num_parts": 3}
    with pytest.raises(ValueError, match="a part failed: pairs: 1 pictures are missing"):
        write_on_ray("pairs", out=str(tmp_path / "out"), **arguments)  # type: ignore[arg-type]
    report = write_on_ray("pairs", out=str(tmp_path / "out"), allow_missing=1, **arguments)  # type: ignore[arg-type]
    assert report.missing == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_second_run_goes_on_with_the_parts_of_the_first_and_leaves_none(cluster: str, tmp_path: Path) -> None:
    """The first was of three parts; a part by itself, of five, lies beside them, and one of another request."""
    source = make_source(tmp_path / "in")
    arguments: dict[str, Any] = {"options": OPTIONS, "format": SMALL, "source": source["source"]}
    parts = tmp_path / "out.parts"
    for part in (Part(1, 3), Part(2, 3), Part(4, 5)):
        write_set("pairs", out=str(parts / f"{part.number}-of-{part.of}"), part=part, **arguments)
    write_set("pairs", out=str(parts / "2-of-7"), part=Part(2, 7), **arguments | {"check": "header"})
    said: list[str] = []
    write_on_ray("pairs", out=str(tmp_path / "out"), say=said.append, **arguments)
    assert sorted(line.split(":")[0] for line in said) == [f"part {number} of 3" for number in (1, 2, 3)]
    assert [path.name for path in parts.iterdir()] == ["2-of-7"]
    write_set("pairs", out=str(parts / "1-of-2"), part=Part(1, 2), **arguments)
    assert write_on_ray("pairs", out=str(tmp_path / "out"), **arguments).already_there
    assert [path.name for path in parts.iterdir()] == ["2-of-7"]
