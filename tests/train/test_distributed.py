"""What a process finds out about itself and the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pipeline.train import distributed
from tests.ranks import Ranks as Pools
from tests.ranks import free_port

_ALONE = """
import json, os, torch
from pipeline.train.distributed import distributed
with distributed() as ranks:
    print(json.dumps([ranks.rank, ranks.world_size, str(ranks.device), torch.get_num_threads(), ranks.gather("x"),
                      os.environ["LOCAL_WORLD_SIZE"]]))
"""


@pytest.mark.parametrize("local_size", [1, 2])
def test_threads_are_shared_among_local_ranks(local_size: int) -> None:
    """The deepspeed launcher says LOCAL_SIZE; two ranks that each take all cores are slower than one."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank in range(local_size):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": local_size, "LOCAL_SIZE": local_size}
        own = {**environment, **{name: str(value) for name, value in places.items()}}
        started.append(subprocess.Popen([sys.executable, "-c", _ALONE], env=own, stdout=subprocess.PIPE, text=True))
    for number, process in enumerate(started):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        rank, world, device, threads, gathered, local_world = json.loads(output.splitlines()[-1])
        assert (rank, world, device, local_world) == (number, local_size, "cpu", str(local_size))
        assert gathered == ["x"] * local_size
        assert threads == max(1, len(os.sched_getaffinity(0)) // local_size)


def _outcomes(fail_on_main: bool) -> object:
    with distributed.distributed() as ranks:

        def action() -> str:
            assert ranks.is_main, "only the main rank acts"
            if fail_on_main:
                raise ValueError("the disk is full")
            return "done"

        return ranks.on_main(action)


def test_what_the_main_rank_does_reaches_all(ranks: Pools) -> None:
    assert ranks(2).run(_outcomes, False) == ["done", "done"]
    with pytest.raises(ValueError, match="the disk is full"):
        ranks(2).run(_outcomes, True)


def _largest() -> list[float]:
    with distributed.distributed() as ranks:
        return ranks.max([15.0 * ranks.rank, 0.0, -ranks.rank])


def test_the_largest_value_of_any_rank_is_everyones(ranks: Pools) -> None:
    assert ranks(2).run(_largest) == [[15.0, 0.0, 0.0]] * 2


def test_a_full_shared_memory_is_said_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100 << 20

    monkeypatch.setattr(distributed.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ValueError, match="has 100 MB free, and 2 ranks need about 160 MB"):
        distributed._check_shared_memory(2)
    distributed._check_shared_memory(1)


def test_only_this_launchs_buffers_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setattr(distributed, "_SHM", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    prefix = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"
    names = [f"{prefix}_29500_0", f"{prefix}_29500_1", f"{prefix}_29501_0", "deepspeed_allreduce_buffer_99_h_29500_0"]
    for name in names:
        open(os.path.join(tmp_path, name), "w").close()
    distributed._unlink_own_buffers()
    assert sorted(os.listdir(tmp_path)) == sorted(names[2:])
