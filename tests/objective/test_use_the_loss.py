"""The code blocks of docs/use-the-loss.md run, and what the page says of them and of the losses is so."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.objective.registry import OBJECTIVES, parameters
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use-the-loss.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))


def run(name: str) -> dict[str, Any]:
    """The names that a block leaves behind."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(BLOCKS[name], f"docs/use-the-loss.md, {name}", "exec"), namespace)
    return namespace


def test_every_block_is_known_here():
    assert set(BLOCKS) == {"plain", "options", "token", "ddp", "open_clip", "accelerate"}
    assert PAGE.count("```python") == len(BLOCKS)


def test_plain():
    losses = run("plain")["losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_options(capsys):
    names = run("options")
    assert names["objective"].gamma == pytest.approx(0.5, abs=0.01)
    assert len(capsys.readouterr().out.splitlines()) == 2
    figures = names["figures"]
    described = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table("| figure |"))))
    assert set(figures) == described


def test_token_is_the_formula():
    names = run("token")
    x, y, mask = (names[name].detach() for name in ("image_tokens", "text_tokens", "text_mask"))
    i2t, t2i = torch.empty(8, 8), torch.empty(8, 8)
    for i in range(8):
        for j in range(8):
            similarity = x[i] @ y[j][mask[j]].T
            i2t[i, j], t2i[i, j] = similarity.amax(1).mean(), similarity.amax(0).mean()
    cross_entropy = torch.nn.functional.cross_entropy
    expected = 0.5 * (cross_entropy(20 * i2t, torch.arange(8)) + cross_entropy(20 * t2i.T, torch.arange(8)))
    assert names["token_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert names["image_tokens"].grad is not None


def test_ddp_prints_the_same_loss_for_any_number_of_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BLOCKS["ddp"], encoding="utf-8")

    def loss(num_processes: int) -> str:
        """What torchrun does, without its agent, which takes longer than the script."""
        shared = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_processes)
        ]
        output = [process.communicate(timeout=240) for process in processes]
        # Not the exit code: DDP keeps gloo's threads alive past destroy_process_group, and one that holds a tensor when
        # Python ends makes torch abort (pytorch/pytorch#179291). By then the script has done all that it says.
        assert not any("Traceback" in stderr for _, stderr in output), output
        return output[0][0]

    assert re.fullmatch(r"loss \d\.\d{4}\n", loss(1))
    assert loss(2) == loss(1)


def test_open_clip():
    names = run("open_clip")
    after = names["model"].state_dict()
    still = {name for name, weight in names["before"].items() if torch.equal(weight, after[name])}
    assert still <= {"attn_mask"}


def test_accelerate():
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    losses = run("accelerate")["losses"]
    assert losses[-1] < losses[0]


def table(head: str) -> list[str]:
    """The rows of the table whose first line starts so."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()
    return lines[2:]


def test_the_table_names_every_loss_with_its_class_and_its_own_parameters():
    shared = set(parameters("infonce"))
    listed = {}
    for row in table("| name |"):
        names, classes, _, params = (cell.strip() for cell in row.strip("|").split("|"))
        listed.update(dict.fromkeys(re.findall(r"`([\w-]+)`", names), (classes, params)))
    assert listed.keys() == OBJECTIVES.keys()
    for name, cls in OBJECTIVES.items():
        classes, params = listed[name]
        assert f"`{cls.__name__}`" in classes
        for parameter in set(parameters(name)) - shared:
            assert f"`{parameter}`" in params or "`hn`" in params, (name, parameter)
