"""The wheel of this checkout, built and installed as a user would have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LEFT_OUT = (".*", "data", "runs", "dist", "build", "tests", "docs", "*.egg-info", "__pycache__")


def build_wheel(folder: Path) -> Path:
    """The wheel, built from a copy of the tree: building leaves folders behind."""
    pytest.importorskip("build")

    def ignored(parent: str, names: list[str]) -> set[str]:
        return shutil.ignore_patterns(*_LEFT_OUT)(parent, names) if Path(parent) == ROOT else {"__pycache__"}

    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=ignored)
    options = ["--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([sys.executable, "-m", "build", *options, str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True)
class Installed:
    """An installed wheel and an empty folder to use it from."""

    site: Path
    empty: Path

    def python(self, *arguments: str) -> str:
        """What Python prints, started in the empty folder; the checkout is not on its path."""
        environment = {**os.environ, "PYTHONPATH": str(self.site), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, cwd=self.empty, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def install_wheel(wheel: Path, folder: Path) -> Installed:
    """Install a wheel, without what it needs: that is in this environment."""
    installed = Installed(folder / "site", folder / "empty")
    installed.empty.mkdir(parents=True)
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(installed.site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, capture_output=True)
    return installed
