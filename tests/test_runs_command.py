"""`pipeline runs`: the list, one run with its curves on a terminal and as PNG, and what becomes of damaged runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from pipeline import cli
from pipeline.liveness import is_gone, this_process
from pipeline.metrics import best_recall, read_metrics
from pipeline.runs_table import ago, find_run, summarize
from tests.test_runs import make_checkpoint


def make_run(path: Path, state: str = "finished", age: float = 60.0, steps: int = 100, **info: Any) -> Path:
    """A run of the recipe `hn` that has logged every tenth of its steps, with an evaluation at every fiftieth."""
    path.mkdir(parents=True)
    values = {"recipe": "hn", "state": state, "created": time.time() - age, "total_steps": 100, "world_size": 2}
    (path / "run.json").write_text(json.dumps({**values, "negatives": 15, "device": "cpu", **info}))
    recipe = {"objective": {"name": "hn", "gamma": 0.5}, "batch": {"size": 16}, "checkpoint": {"best_by": "mean"}}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(10, steps + 1, 10):
            file.write(json.dumps(line(step)) + "\n")
            if step % 50 == 0:
                recall = {"t2i": {"1": 10.0 + step / 10}, "i2t": {"1": 40.0 - step / 5}}
                file.write(json.dumps({"step": step, "epoch": step // 50, "val": recall}) + "\n")
    return path


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step // 51 + 1,
        "loss": 10.0 / step,
        "objective": 8.0 / step,
        "logit_scale": 14.3,
        "lr": 1e-3 * (1 - step / 100),
        "lr_groups": [1e-3, 1e-4, 1e-4],
        "grad_norm": math.nan if step == 20 else 2.0,
        "negatives": 15,
        "saturation": {"zero_rows": step / 100, "zero_columns": 0.1, "dtype": "float32/float32"},
        "pairs_per_second": 123.4,
        "tokens_per_second": 4567.0,
        "captions_cut": 0.125,
        "time_share": {"data": 0.1, "objective": 0.2, "communication": 0.3, "data_slowest": 0.15},
        "memory": {"rss": [812.0, 901.0], "workers": [0.0, 0.0]},
    }


def gone() -> dict[str, Any]:
    """A process that was, and has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {**this_process(), "pid": process.pid}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Runs of every state, and damaged ones."""
    runs = tmp_path / "runs"
    make_run(runs / "done", age=3 * 86400)
    make_run(runs / "sweep" / "now", "running", age=5, steps=40, process=this_process())
    make_run(runs / "killed", "running", age=7200, steps=70, process=gone())
    make_run(runs / "elsewhere", "running", age=100, process={**gone(), "host": "another-machine"})
    make_run(runs / "paused", "stopped", age=400)
    make_run(runs / "broken", "failed", age=500, steps=0)
    for name, content in {"cut": '{"recipe": "a", "crea', "list": "[]", "empty": "{}", "word": "x"}.items():
        (runs / name).mkdir()
        (runs / name / "run.json").write_text(content)
    (runs / "bare" / "checkpoints").mkdir(parents=True)
    make_run(runs / "odd", "sleeping")
    (runs / "notes").mkdir()
    return runs


def run(*words: str, columns: int = 120) -> str:
    """What the command prints; it must succeed."""
    result = CliRunner().invoke(cli.app, ["runs", *words], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


# the list -------------------------------------------------------------------------------------------------------------


def test_the_list_is_for_scripts_as_well(root: Path) -> None:
    found = {entry["name"]: entry for entry in json.loads(run("--runs", str(root), "--json"))}
    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {
        "sweep/now": "running",
        "elsewhere": "running",
        "paused": "stopped",
        "broken": "failed",
        "killed": "died",
        "done": "finished",
        **dict.fromkeys(["cut", "list", "empty", "word", "bare", "odd"], "damaged"),
    }
    assert [(name, entry["step"]) for name, entry in found.items()][:6] == [
        ("sweep/now", 40),
        ("elsewhere", 100),
        ("paused", 100),
        ("broken", 0),
        ("killed", 70),
        ("done", 100),
    ], "newest first"
    assert found["done"]["best"] == {"step": 50, "t2i": 15.0, "i2t": 30.0}
    assert found["killed"]["best"]["step"] == 50
    assert found["sweep/now"]["best"] is None
    assert (found["done"]["recipe"], found["done"]["total_steps"]) == ("hn", 100)
    for name, problem in {"cut": "not readable as JSON", "bare": "no run.json", "odd": "'sleeping'"}.items():
        assert problem in found[name]["problem"]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_list_fits_into_the_terminal(root: Path, columns: int) -> None:
    lines = run("--runs", str(root), columns=columns).splitlines()
    table = [row for row in lines if " is damaged: " not in row]
    assert max(map(len, table)) <= columns
    (killed,) = [row.split() for row in table if row.startswith("killed")]
    assert [cell for cell in killed if cell != "hn"][:6] == ["killed", "died", "70/100", "15.0/30.0", "2", "h"]
    assert ("recipe" in table[0].split()) == ("logged" in table[0].split()) == (columns >= 80)
    assert sum(" is damaged: " in row for row in lines) == 6


def test_no_runs_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run("--runs", str(tmp_path)) == f"no runs under {tmp_path}/\n"
    assert json.loads(run("--runs", str(tmp_path), "--json")) == []
    monkeypatch.setattr(sys, "argv", ["pipeline", "runs", "--runs", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: no folder {tmp_path / 'nowhere'}/ with runs")


@pytest.mark.parametrize("by", ["mean", "t2i", "i2t"])
def test_the_best_evaluation_is_the_one_whose_checkpoint_is_kept(tmp_path: Path, by: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"checkpoint": {"best_by": by}}))
    # At step 50: 15 and 30; at step 100: 20 and 20.
    assert summarize(folder, tmp_path).best["step"] == {"mean": 50, "t2i": 100, "i2t": 50}[by]  # type: ignore[index]


def test_the_last_of_equal_evaluations_is_the_best() -> None:
    lines = [{"step": s, "val": {"t2i": {"1": r}, "i2t": {"1": r}}} for s, r in ((1, 5), (2, 7), (3, 7), (4, 6))]
    assert best_recall([*lines, {"step": 5, "val": None}, {"step": 6, "val": {"t2i": {}}}, line(7)]) == {
        "step": 3,
        "t2i": 7.0,
        "i2t": 7.0,
    }


def test_a_process_is_known_by_host_number_and_beginning() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone({**me, "began": me["began"] - 100}), "another process has the number now"
    assert is_gone(gone())
    assert not is_gone({**gone(), "host": "another-machine"}), "who knows"
    assert not any(is_gone(unknown) for unknown in (None, {}, {"pid": "x"}, {"host": me["host"]}))


def test_lines_that_are_cut_short_or_foreign_are_passed_over(tmp_path: Path) -> None:
    good = json.dumps({"step": 3, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_bytes(f'{good}\n[1]\n"x"\n{{"loss": 1}}\n\n'.encode() + b"\xff\xfe\n" + b'{"st')
    assert read_metrics(tmp_path) == [{"step": 3, "loss": 1.0}]
    assert read_metrics(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400, "1 d"), (-5, "0 s")]
)
def test_ages(seconds: float, text: str) -> None:
    assert ago(1000.0, 1000.0 + seconds) == text


# one run --------------------------------------------------------------------------------------------------------------


def test_one_run_is_shown_with_its_facts_and_a_picture(root: Path) -> None:
    make_checkpoint(root / "done", 50)
    make_checkpoint(root / "done", 100)
    text = run("show", "done", "--runs", str(root))
    facts = dict(re.split(r"  +", row, maxsplit=1) for row in text.split("\n\n")[0].splitlines())
    assert facts["state"] == "finished"
    assert facts["objective"] == "hn gamma=0.5"
    assert facts["batch"] == "16 pairs, 15 negatives per positive"
    assert facts["ranks"] == "2 on cpu"
    assert facts["step"] == "100/100, epoch 2"
    assert facts["best R@1"] == "15.0/30.0 text to image / image to text, at step 50"
    assert facts["loss"] == "0.1000, logit_scale 14.30"
    assert facts["speed"] == "123.4 img/s, 4567 tokens/s"
    assert facts["memory"] == "rss 901 MiB, workers 0 MiB"
    assert facts["captions cut"] == "12.5%"
    assert facts["checkpoints"] == "newest step-00000100"
    assert f"picture: {root}/done/curves.png" in text
    with Image.open(root / "done" / "curves.png") as picture:
        assert picture.format == "PNG"
        assert picture.width >= 1000
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50, "something is drawn"


@pytest.mark.parametrize(("columns", "beside"), [(60, False), (99, False), (120, True)])
def test_curves_fill_the_terminal_and_no_more(root: Path, columns: int, beside: bool) -> None:
    text = run("show", "done", "--runs", str(root), columns=columns)
    curves = [row for row in text.split("\n\n", 1)[1].splitlines() if not row.startswith("picture: ")]
    assert columns - 4 <= max(map(len, curves)) <= columns
    titles = [row for row in curves if "validation R@1" in row]
    assert len(titles) == 1
    assert (titles[0].split()[0] == "loss") == beside, "the first two panels share their lines"
    assert any("time" in row for row in curves), "the last panel is not cut off, however low the terminal"


def test_json_of_a_run_is_strict(root: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = run("show", "done", "--runs", str(root), "--json")
    shown = json.loads(text, parse_constant=refuse)
    assert shown["recipe_values"]["objective"] == {"name": "hn", "gamma": 0.5}
    assert [m["step"] for m in shown["metrics"] if "loss" in m] == list(range(10, 101, 10))
    assert shown["metrics"][1]["grad_norm"] is None
    assert not (root / "done" / "curves.png").exists()
    assert run("--json", "--runs", str(root), "show", "done") == text, "options may come before `show`"


def test_the_picture_goes_where_it_is_asked_for(root: Path, tmp_path: Path) -> None:
    assert f"picture: {tmp_path}/a.png" in run("show", "done", "--runs", str(root), "--png", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").is_file()
    assert not (root / "done" / "curves.png").exists()
    run("show", "done", "--runs", str(root), "--json", "--png", str(tmp_path / "b.png"))
    assert (tmp_path / "b.png").is_file()


def test_a_run_is_found_by_name_folder_and_recipe(root: Path) -> None:
    assert find_run("sweep/now", root).name == "sweep/now"
    assert find_run("now", root).name == "sweep/now"
    assert find_run(str(root / "paused"), root).name == "paused"
    assert find_run("hn", root).name == "sweep/now", "the newest of its recipe"
    with pytest.raises(ValueError, match="did you mean 'paused'"):
        find_run("pasued", root)
    with pytest.raises(ValueError, match="see `pipeline runs`"):
        find_run("zzz", root)
    with pytest.raises(ValueError, match=r"no run '.*notes' under .*: see `pipeline runs`"):
        find_run(str(root / "notes"), root)


@pytest.mark.parametrize("name", ["cut", "list", "empty", "word", "bare", "odd", "broken"])
def test_what_is_damaged_or_empty_is_shown_as_that(root: Path, name: str) -> None:
    text = run("show", name, "--runs", str(root))
    assert f"state{' ' * 2}" in re.sub(r" +", "  ", text)
    assert json.loads(run("show", name, "--runs", str(root), "--json"))["state"] in ("damaged", "failed")


@pytest.mark.parametrize("harm", ["recipe.yaml", "metrics.jsonl", "manifest", "manifest list"])
def test_a_run_with_one_damaged_file_shows_the_rest(root: Path, harm: str) -> None:
    manifest = make_checkpoint(root / "done", 100) / "manifest.json"
    content = b"[]" if harm == "manifest list" else b"\xff{: ]"
    (manifest if harm.startswith("manifest") else root / "done" / harm).write_bytes(content)
    text = run("show", "done", "--runs", str(root))
    assert re.search(r"state +finished", text)
    assert bool(re.search(r"checkpoints +damaged: ", text)) == harm.startswith("manifest")


def test_the_command_loads_no_torch(root: Path) -> None:
    code = (
        "import sys; from pipeline.cli import main; sys.argv = {words!r}\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "heavy = {{'torch', 'streaming', 'open_clip', 'transformers', 'deepspeed', 'omegaconf'}} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for words in (["runs", "--runs", str(root)], ["runs", "show", "done", "--runs", str(root)]):
        script = code.format(words=["pipeline", *words])
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
