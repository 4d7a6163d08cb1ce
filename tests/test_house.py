"""The house itself: packaging, make targets, names and sizes of files."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "export", "launcher", "pipeline", "shards")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_files() -> list[Path]:
    return [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]


# packages -------------------------------------------------------------------------------------------------------------


def test_every_package_is_listed_and_every_listed_one_is_there():
    """Automatic discovery fails on this layout, so a folder that is not listed would be missing in a wheel."""
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in source_files()}
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])
    assert [name for name in folders if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()] == []


def test_exactly_one_onnxruntime_is_installed_on_any_platform():
    """Both packages fill the same import folder."""
    wanted = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    wanted = [requirement for requirement in wanted if requirement.name.startswith("onnxruntime")]
    assert {requirement.name for requirement in wanted} == {"onnxruntime", "onnxruntime-gpu"}
    platforms, machines = ("linux", "darwin", "win32", "cygwin"), ("x86_64", "aarch64", "arm64", "AMD64", "ppc64le")
    for platform, machine in itertools.product(platforms, machines):
        place = {"sys_platform": platform, "platform_machine": machine}
        chosen = [r.name for r in wanted if r.marker is None or r.marker.evaluate(place)]
        assert chosen == (["onnxruntime-gpu"] if (platform, machine) == ("linux", "x86_64") else ["onnxruntime"])


def test_the_wheel_holds_every_source_and_config_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    configs = [path for pattern in ("*.json", "*.yaml") for path in (ROOT / "configs").rglob(pattern)]
    assert len(configs) >= 9
    assert held >= {str(path.relative_to(ROOT)) for path in [*source_files(), *configs]}
    assert {name.split("/")[0] for name in held} == set(ROOMS)
    assert licences


INSTALLED = """
import pipeline, configs
from pipeline.cli import main
from pipeline.config import find_config, load_recipe
print(pipeline.__file__, find_config("zero3", "", ".json"), find_config("lite0-minilm", "models", ".json"), sep="\\n")
print(load_recipe("default").objective.name)
"""


def test_the_wheel_works_away_from_the_checkout(installed):
    *places, objective = installed.python("-c", INSTALLED).splitlines()
    assert [Path(place).relative_to(installed.site) for place in places] == [
        Path("pipeline/__init__.py"),
        Path("configs/zero3.json"),
        Path("configs/models/lite0-minilm.json"),
    ]
    assert objective == "hn"
    listed = installed.python("-m", "pipeline.cli", "shards", "list").splitlines()
    assert {"dci", "ifct", "openmoji", "pairs"} <= {line.split()[0] for line in listed if line.strip()}


# make -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_target_is_phony_and_in_the_help(makefile):
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    assert targets == set(phony.split())
    command = ["make", "--no-print-directory", "help"]  # make under make, as in CI, says where it is
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert targets == {line.split()[1] for line in shown.splitlines()}
    assert all(len(line.split()) > 2 for line in shown.splitlines())


def test_make_alone_shows_the_help(makefile):
    shown = [
        subprocess.run(["make", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for words in ([], ["help"])
    ]
    assert shown[0] == shown[1]


def test_the_folder_called_shards_does_not_make_its_target_up_to_date(makefile, tmp_path):
    (tmp_path / "Makefile").write_text(makefile, encoding="utf-8")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "shards").mkdir()
    command = ["make", "--dry-run", "shards", "DATASET=dci"]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "shards write 'dci'" in shown


# files ----------------------------------------------------------------------------------------------------------------


def test_no_file_of_the_launcher_hides_another_module():
    """Under the deepspeed launcher, launcher/ is the first place where every import looks."""
    names = {path.stem for path in (ROOT / "launcher").glob("*.py")} - {"__init__"}
    others = sys.stdlib_module_names | set(packages_distributions()) | set(ROOMS)
    assert names
    assert names & others == set()


def test_source_files_stay_small():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()
    }
    assert {name: lines for name, lines in lengths.items() if lines > 300} == {}


def test_every_mark_in_the_makefile_is_declared(makefile):
    declared = {line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    used = {word for line in re.findall(r"pytest -m '?([a-z ]+)'?", makefile) for word in line.split()}
    assert used - {"not", "and", "or"} == declared
