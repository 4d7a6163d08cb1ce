"""Who a process is, from the variables that launchers set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runs import Run
from pipeline.train.launch_env import first_host, set_rank_variables
from tests.ranks import free_port
from tests.train.tiny import losses_of, train_on_rank, write_recipe

REPOSITORY = Path(__file__).parents[2]


def ranks_of(**env: str) -> tuple[str, ...]:
    set_rank_variables(env)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return tuple(env[name] for name in names)


def test_nobody_launched_it():
    *ranks, port = ranks_of()
    assert ranks == ["0", "1", "0", "1", "127.0.0.1"]
    assert int(port) > 0


def test_the_deepspeed_launcher():
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert ranks_of(**given, LOCAL_SIZE="4") == ("5", "8", "1", "4", "a", "29500")


def test_torchrun():
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert ranks_of(**given, LOCAL_WORLD_SIZE="2") == ("3", "4", "1", "2", "a", "1")


def test_one_process_a_pod():
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert ranks_of(**given) == ("1", "2", "0", "1", "job-master-0", "23456")


def test_srun():
    given = {
        "SLURM_JOB_ID": "123456789",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "2",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
    }
    assert ranks_of(**given) == ("6", "8", "2", "4", "gpu07", "26789")


def test_a_batch_script_without_srun_is_one_process():
    assert ranks_of(SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_NTASKS="8")[:4] == ("0", "1", "0", "1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-04,07],login", "gpu03"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("dgx-a[10,3]", "dgx-a10"),
    ],
)
def test_the_first_host(nodes: str, first: str):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, and MASTER_ADDR, MASTER_PORT not"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE is set, and RANK not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "rank 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 'x', not a number"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "a,b"},
            "every node needs equally many",
        ),
    ],
)
def test_what_cannot_be(env: dict[str, str], says: str):
    with pytest.raises(ValueError, match=says):
        set_rank_variables(env)


def _private_mounts() -> bool:
    """Whether this user may give a process a /dev/shm of its own."""
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _private_mounts(), reason="two nodes on one machine need mount namespaces, which need root")
def test_two_nodes_of_two_ranks_train_as_four_ranks_do(tiny_set: Path, tmp_path: Path, ranks) -> None:
    """Each "node" has its own /dev/shm and TMPDIR: streaming's names and locks and DeepSpeed's buffers are a node's."""
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    port = str(free_port())
    nodes = []
    for node in range(2):
        processes = "".join(
            f"RANK={2 * node + local} LOCAL_RANK={local} {sys.executable} -m pipeline.cli train --config zero2.json "
            f'--recipe {recipe} --set run.name=nodes > {tmp_path}/rank{2 * node + local}.log 2>&1 & pids="$pids $!"; '
            for local in range(2)
        )
        script = f"mount -t tmpfs tmpfs /dev/shm; {processes} for pid in $pids; do wait $pid || exit 1; done"
        shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        temporary = tmp_path / f"node{node}"
        temporary.mkdir()
        env = {**os.environ, **shared, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        nodes.append(subprocess.Popen(["unshare", "--mount", "sh", "-c", script], cwd=REPOSITORY, env=env))
    codes = [node.wait(timeout=300) for node in nodes]
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text()[-2000:] for rank in range(4))
    assert codes == [0, 0], logs

    ranks(4).run(train_on_rank, "zero2.json", str(recipe), ["run.name=ranks"])
    losses = [losses_of(tmp_path / "runs" / name) for name in ("nodes", "ranks")]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert Run(tmp_path / "runs" / "nodes").info["state"] == "finished"
