"""Which rank this process is, from the variables of its launcher: DeepSpeed, torchrun, Slurm, Kubernetes or none."""

from __future__ import annotations

import re
import socket
from collections.abc import MutableMapping

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _NUM_PORTS = 20000, 10000


def set_rank_variables(env: MutableMapping[str, str]) -> None:
    """Complete RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in `env`.

    What is there stays. The `deepspeed` launcher says LOCAL_SIZE for LOCAL_WORLD_SIZE. A Kubernetes job that starts one
    process a pod says RANK and WORLD_SIZE only: each is then alone on its node. Under `srun` Slurm's variables are
    translated. With none of these the process is a world of one.

    Raises:
        ValueError: Some of the variables are there and others are not, or they contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing and env.get("WORLD_SIZE") != "1":
            said = "RANK" if "RANK" in env else "WORLD_SIZE"
            raise ValueError(f"{said} is set, and {', '.join(missing)} not: set all of them, or none for one process")
        if "LOCAL_RANK" not in env:
            env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = "0", "1"
    elif "SLURM_STEP_NUM_TASKS" in env:  # set by srun, for each task; a batch script alone has it not
        _from_slurm(env)
    env.setdefault("RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", "1"))
    env.setdefault("MASTER_ADDR", _LOOPBACK)
    if "MASTER_PORT" not in env:
        env["MASTER_PORT"] = str(_free_port())
    _check(env)


def _from_slurm(env: MutableMapping[str, str]) -> None:
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
    if env["WORLD_SIZE"] != "1":
        # Every task of a step computes the same port, and two jobs or steps on one node hardly ever do.
        number = int(env["SLURM_JOB_ID"]) + 997 * int(env.get("SLURM_STEP_ID", "0"))
        env.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _NUM_PORTS))


def _tasks_per_node(listed: str) -> str:
    """`4(x2)` and `4` are four on every node; `4(x2),3` is refused."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", listed)
    if match is None:
        raise ValueError(f"Slurm runs {listed} tasks per node: every node needs equally many (--ntasks-per-node)")
    return match.group(1)


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes: `gpu[03-04,07],login` begins with gpu03."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodes)
    if match is None or not match.group(0):
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node")
    return "".join(part or "" for part in match.groups())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        port: int = free.getsockname()[1]
        return port


def _check(env: MutableMapping[str, str]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    for name in names:
        if not env[name].isdigit():
            raise ValueError(f"{name} is {env[name]!r}, not a number")
    rank, world_size, local_rank, local_size, _ = (int(env[name]) for name in names)
    if not (rank < world_size and local_rank < local_size <= world_size):
        raise ValueError(
            f"rank {rank} of {world_size}, and {local_rank} of {local_size} on its node, cannot be: see RANK, "
            "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if world_size % local_size:
        raise ValueError(f"{world_size} ranks are not a whole number of nodes with {local_size} each")
