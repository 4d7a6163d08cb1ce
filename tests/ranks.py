"""Real ranks for distributed tests: processes with a gloo group, started once and reused by every test.

A test takes the `ranks` fixture and runs a module-level function on W ranks:

    def total(value: float) -> float:
        tensor = torch.tensor(value) * dist.get_rank()
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(ranks):
        assert ranks(4).run(total, 1.0) == [6.0] * 4

Inside, the default process group is initialised, and the environment is that of a launcher, so that
`deepspeed.initialize` reuses the group. The processes outlive a test: whatever a function leaves behind in one (seeds,
subgroups, globals), the next function finds. Arguments and results travel by pickle.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
TIMEOUT_S = 300.0  # the first DeepSpeed engine on a machine compiles its CPU collectives
# How long the other ranks may take once one has failed; they may be waiting for it in a collective, and then never end.
GRACE_S = 5.0


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


class RankError(RuntimeError):
    """A rank died, or did not answer in time."""


class RemoteTraceback(Exception):  # noqa: N818 - shown as the cause of an error, never caught
    """The traceback of an exception, as text from the process that raised it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Pool:
    """W processes that run functions together. Started by the first `run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
        """`function(*args)` on every rank at once; the results in the order of the ranks.

        Raises:
            RankError: a rank died, or needed more than `timeout` seconds. The next call starts new processes.
            Exception: whatever a rank raised first, with that rank's traceback as its cause.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(getattr(function, "__name__", repr(function)), timeout)

    def dismiss(self) -> None:
        """Tell the ranks to end, without waiting for it."""
        for connection in self._connections:
            connection.close()  # an idle rank reads the end of its pipe, and returns

    def close(self) -> None:
        """End the processes, and remove the shared memory that DeepSpeed's collectives leave behind."""
        self.dismiss()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._store is not None:
            for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{HOST}_{self._store.port}_*"):
                leftover.unlink(missing_ok=True)
        self._processes, self._connections, self._store = [], [], None

    def _start(self) -> None:
        # The store lives here, on a port that the system chose: no rank can lose the race for a "free" port.
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world_size, self._store.port)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank{rank}of{self.world_size}")
            process.start()
            theirs.close()  # else the pipe would stay open when the rank dies
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("the start", TIMEOUT_S)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        results: list[Any] = [None] * self.world_size
        failure: BaseException | None = None
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(pending.values())
                self._kill()
                raise failure or RankError(f"{what}: rank(s) {late} of {self.world_size} not done after {timeout:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    result, error = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE_S)
                    exit_code = self._processes[rank].exitcode
                    self._kill()
                    raise RankError(f"{what}: rank {rank} died with exit code {exit_code}") from failure
                results[rank] = result
                if error is not None and failure is None:
                    failure = _with_traceback(rank, *error)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failure is not None:
            raise failure
        return results

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()


class Ranks:
    """The pools of a test session, by number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        """The pool with so many ranks; its processes start when it first runs something."""
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.dismiss()
        for pool in self._pools.values():
            pool.close()


def _serve(connection: Connection, rank: int, world_size: int, port: int) -> None:
    """Body of a rank: join the group, then run what comes through the pipe until it closes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",  # the group is gloo, also on a machine with accelerators
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    connection.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(_answer(message))
    dist.destroy_process_group()


def _answer(message: bytes) -> bytes:
    """The pickled (result, error) of the pickled (function, arguments)."""
    try:
        function, args = pickle.loads(message)
        return pickle.dumps((function(*args), None))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RankError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, (error, text)))


def _with_traceback(rank: int, error: BaseException, text: str) -> BaseException:
    error.__cause__ = RemoteTraceback(text)
    error.add_note(f"raised on rank {rank}")
    return error
