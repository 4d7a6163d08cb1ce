"""The commands about shards: output, exit codes, one line for what a user got wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from shards.sources import SOURCES
from shards.writer import write_set
from tests.shards.layouts import dci_files, write_tar, write_tree

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `pipeline shards ...` in this process: exit code, standard output, standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", "shards", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with DCI in data/dci and two of its photographs missing."""
    monkeypatch.chdir(tmp_path)
    annotations, photos = dci_files()
    write_tree(tmp_path / "data" / "dci", annotations)
    (tmp_path / "data" / "dci" / "densely_captioned_images" / "photos").mkdir()  # empty, as shipped
    kept = {name: data for name, data in photos.items() if "1545001" in name or "1545002" in name}
    write_tar(tmp_path / "data" / "dci" / "sa_000138.tar", kept)
    return tmp_path


def test_write_info_preview_overlap(folder: Path, run: Run) -> None:
    code, _, error = run("write", "dci")
    assert code == 2
    assert error.startswith("error: dci: 2 pictures are missing, 0 may be: sa_1545004 (sa_1545004.jpg)")
    assert error.count("\n") == 1
    assert not (folder / "data" / "mds" / "dci").exists()
    for name in ("dci", "long-dci"):
        code, out, error = run("write", name, "--allow-missing", "2")
        assert (code, error) == (0, "")
        assert "wanted 5, written 2, rejected 1, missing 2" in out
    code, out, _ = run("info", "dci")
    assert code == 0
    assert "licence: captions CC BY-NC 4.0, photographs SA-1B licence" in out
    assert "train: 1 pairs, 1 captions" in out
    code, out, _ = run("preview", "dci", "--count", "3")
    assert "dci.html: 2 pairs" in out
    assert (folder / "data" / "mds" / "dci.html").is_file()
    assert run("verify", "dci")[0] == 0, "the page is no stranger in the set"
    code, out, _ = run("overlap", "dci", "long-dci")
    assert code == 0
    assert "dci/train (1) and long-dci/test (2) share 1 id, 1 picture, 1 caption: sa_1545001" in out


def test_every_source_says_what_it_is_and_needs(run: Run) -> None:
    _, listed, _ = run("list")
    for source in SOURCES.values():
        assert source.name in listed
        assert source.licence in listed
        assert source.needs in listed
        assert all(option.help in listed for option in source.options.values())


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.takes_source])
def test_a_source_without_its_data_names_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setenv("PIPELINE_MIRROR", str(tmp_path / "nothing"))
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        write_set(name)
    assert SOURCES[name].needs.removeprefix("what dci needs: ") in str(error.value)
