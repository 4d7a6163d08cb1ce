"""The fixture that other tests run on: real ranks that survive errors, and end with the session."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Pool, RankError, RemoteTraceback


def total(value: float) -> float:
    tensor = torch.tensor(value) * dist.get_rank()
    dist.all_reduce(tensor)
    return tensor.item()


def process_and_environment() -> tuple[int, str, str]:
    return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such caption")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_ranks_run_together_and_stay(ranks):
    pool = ranks(2)
    assert pool.run(total, 2.0) == [2.0, 2.0]
    first, second = pool.run(process_and_environment), ranks(2).run(process_and_environment)
    assert first == second
    assert [answer[1:] for answer in first] == [("0", "2"), ("1", "2")]


def test_an_exception_comes_back_with_its_traceback_and_the_ranks_go_on(ranks):
    with pytest.raises(KeyError, match="no such caption") as raised:
        ranks(2).run(fail_on, 1)
    assert raised.value.__notes__ == ["raised on rank 1"]
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "in fail_on" in str(raised.value.__cause__)
    assert ranks(2).run(total, 1.0) == [1.0, 1.0]


def test_dead_and_late_ranks_are_named_and_replaced():
    pool = Pool(2)
    with pytest.raises(RankError, match="die_on: rank 1 died with exit code 3"):
        pool.run(die_on, 1)
    with pytest.raises(RankError, match=r"sleep_on: rank\(s\) \[1\] of 2 not done after 1 s"):
        pool.run(sleep_on, 1, timeout=1)
    assert pool.run(total, 1.0) == [1.0, 1.0]
    (pid, *_), _ = pool.run(process_and_environment)
    pool.close()
    assert not Path(f"/proc/{pid}").exists()
