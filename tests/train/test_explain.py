"""Errors of the libraries below are one line with the next step: the libraries themselves raise them here."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from streaming import StreamingDataset
from torch.utils.data import DataLoader, Dataset

from pipeline.data.shared_memory import build_dataset
from pipeline.train.explain import explained, one_line
from tests.ranks import free_port
from tests.train.tiny import write_recipe

REPOSITORY = Path(__file__).parents[2]


NAMES = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8"}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)


class Failing(Dataset[int]):
    """Whose loader process meets a broken disk, a wrong value, or its end."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.how == "disk":
            raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/shard.7")
        if self.how == "value":
            raise ValueError("no sample can be read;\nrun this: or that")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_port_in_use(address: None) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(RuntimeError) as caught:
            dist.TCPStore("127.0.0.1", busy.getsockname()[1], 1, True, timedelta(seconds=30), use_libuv=True)
    line = explained(caught.value)
    assert line is not None
    assert line.startswith("the ranks cannot meet at node7:29500, where another program listens: end it")


def test_a_main_rank_that_is_not_there(address: None) -> None:
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", free_port(), 2, False, timedelta(seconds=1))
    line = explained(caught.value)
    assert line is not None
    assert line.startswith("rank 3 of 8 has not met the others at node7:29500 (The client socket has ")
    assert "\n" not in line


def test_ranks_that_never_come(address: None) -> None:
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=1))
    line = explained(caught.value)
    assert line is not None
    assert "1/2 clients joined): does every node run, with the same MASTER_ADDR" in line


@pytest.mark.parametrize(
    ("how", "line"),
    [("disk", "[Errno 5] Input/output error: '/data/shard.7'"), ("value", "no sample can be read;; run this: or that")],
)
def test_what_a_loader_process_raises(how: str, line: str) -> None:
    with pytest.raises((OSError, ValueError)) as caught:
        list(DataLoader(Failing(how), num_workers=1))
    assert "Traceback" in str(caught.value)
    assert one_line(str(caught.value)) == line


def test_a_loader_process_that_was_killed() -> None:
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(Failing("kill"), num_workers=1))
    line = explained(caught.value)
    assert line is not None
    assert line.endswith(": too little memory is the usual reason; lower data.workers or batch.size")
    assert "\n" not in line


def test_a_split_without_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:  # streaming would look for other ranks
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(RuntimeError) as caught:
        build_dataset(lambda: StreamingDataset(local=str(tmp_path), batch_size=1))
    line = explained(caught.value)
    assert line is not None
    assert line.startswith("Stream contains no samples: ")
    assert line.endswith("write the set again, or name another split (data.train_split)")


@pytest.mark.parametrize("text", ["Connection closed by peer [10.0.0.7]:3999", "expected scalar type Float"])
def test_other_errors_are_left_alone(text: str) -> None:
    assert explained(RuntimeError(text)) is None
    assert one_line(text) == text


def test_a_run_whose_port_is_taken_says_so_in_one_line(tiny_set: Path, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, tiny_set))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "launcher/train.py", "--config", "zero1.json", "--recipe", recipe],
            cwd=REPOSITORY,
            env={**os.environ, **ours, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 2, done.stderr
    assert f"error: the ranks cannot meet at 127.0.0.1:{port}, where another program listens" in done.stderr
    assert "Traceback" not in done.stderr
