"""The command line: what it says, what it imports, and how it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from pipeline import cli
from shards.sources import SOURCES

HEAVY = ("torch", "streaming", "open_clip", "transformers", "deepspeed", "timm", "onnxruntime", "pyarrow")
LIGHT = ("numpy", "PIL", "omegaconf")  # light enough for a command that works, not for --help


def commands() -> list[list[str]]:
    """Every command and group, as one types it."""

    def below(command: Any, words: list[str]) -> list[list[str]]:
        found = [words]
        for name, child in getattr(command, "commands", {}).items():
            found += below(child, [*words, name])
        return found

    return below(typer.main.get_command(cli.app), [])


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command line with these words."""
    monkeypatch.setattr(sys, "argv", ["pipeline", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_of_every_command(words):
    result = CliRunner().invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0
    assert f"Usage: pipeline {' '.join(words)}".strip() in " ".join(result.output.split())


def test_the_commands_are_those_of_the_design():
    typed = {" ".join(words) for words in commands()}
    assert {"shards list", "shards write", "shards verify", "train", "evaluate", "export", "index", "search"} <= typed
    assert {"runs", "runs show"} <= typed


def test_shards_list_names_every_set_with_its_licence(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "shards", "list")
    assert code == 0
    lines = out.splitlines()
    for name, source in SOURCES.items():
        (place,) = [number for number, line in enumerate(lines) if line.split()[0] == name]
        assert source.licence in lines[place + 1]
        assert source.needs in lines[place + 2]


IMPORTS = """
import sys
from pipeline.cli import main
sys.argv = ["pipeline", *{words}]
try:
    main()
except SystemExit:
    pass
print("loaded:", *sorted(set({modules}) & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["--help"], HEAVY + LIGHT),
        (["train", "--help"], HEAVY + LIGHT),
        (["runs", "show", "--help"], HEAVY + LIGHT),
        (["shards", "list"], HEAVY),
        (["shards", "write", "opnmoji"], HEAVY),
    ],
    ids=" ".join,
)
def test_heavy_modules_are_not_imported(words, modules):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(words=words, modules=modules)], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("module", ["pipeline.preprocess", "pipeline.runs", "pipeline.config", "shards.images"])
def test_modules_that_promise_it_import_no_torch(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'streaming', 'open_clip'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "say which format: pipeline export --onnx"),
        (["shards", "write", "opnmoji"], "unknown data set 'opnmoji'; did you mean openmoji?"),
        (["shards", "write", "pairs", "--option", "split"], "--option takes key=value, not 'split'"),
        (["shards", "write", "pairs"], "pairs needs: SOURCE="),
        (["shards", "verify", "nowhere"], "no shard set 'nowhere'"),
        (["evaluate", "nothing", "nowhere"], "no shard set 'nowhere'"),
        (["train", "--recipe", "algin"], "did you mean 'align'?"),
        (["train", "--set", "dta.set=x"], "unknown key 'dta'; did you mean 'data'?"),
        (["train", "--config", "zero9.json"], "did you mean 'zero"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_users_get_wrong_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize("split", ["nope", "test"])
def test_evaluate_says_what_is_missing(monkeypatch, capsys, tmp_path, tiny_set, split):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, "evaluate", "nothing", str(tiny_set), "--split", split)
    assert code == 2
    wanted = "has no split 'nope'; it has test, train, val" if split == "nope" else "'nothing' is neither a checkpoint"
    assert wanted in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words", [["trian"], ["train", "--recpie", "hn"], ["evaluate"], ["search", "x", "y", "--top", "0"]]
)
def test_usage_errors_exit_with_2_as_well(monkeypatch, capsys, words):
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert err.startswith("Usage: ")
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback_and_debug_shows_every_one(monkeypatch, capsys):
    monkeypatch.setenv("PIPELINE_DEBUG", "1")
    code, _, err = run(monkeypatch, capsys, "export")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: say which format")
    monkeypatch.setattr(cli, "app", lambda: {}["bug"])
    with pytest.raises(KeyError):
        cli.main()


def test_verify_exits_with_0_for_a_sound_set_and_1_for_a_damaged_one(monkeypatch, capsys, tmp_path, tiny_set):
    assert run(monkeypatch, capsys, "shards", "verify", str(tiny_set))[0] == 0
    copy = shutil.copytree(tiny_set, tmp_path / "copy")
    (shard,) = (copy / "val").glob("*.mds")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, _ = run(monkeypatch, capsys, "shards", "verify", str(copy))
    assert code == 1
    assert shard.name in out
