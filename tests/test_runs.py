"""Runs and checkpoints on disk: which one a user means, and what is not one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pipeline.runs import MANIFEST, WEIGHTS, Checkpoint, Run, find_checkpoint, newest_run, read_json, write_json


def make_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    (folder / "zero").mkdir(parents=True)
    files = {}
    for name in (WEIGHTS, "zero/optimizer.pt"):
        content = f"{name} of step {step}".encode()
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(folder / MANIFEST, {"step": step, "files": files})
    return folder


def make_run(path: Path, recipe: str, created: float, steps: tuple[int, ...] = (1,)) -> Path:
    path.mkdir(parents=True)
    write_json(path / "run.json", {"recipe": recipe, "created": created, "state": "finished"})
    for step in steps:
        make_checkpoint(path, step)
    return path


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Three runs: `old` and `demo/new` of recipe a, `other` of recipe b between them. The working folder is empty."""
    runs = tmp_path / "runs"
    make_run(runs / "old", "a", 1.0, (5, 100))
    make_run(runs / "other", "b", 2.0)
    make_run(runs / "demo" / "new", "a", 3.0, (7,))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return runs


def test_a_checkpoint_folder_is_itself_by_path_and_below_the_root(root):
    folder = root / "old" / "checkpoints" / "step-00000005"
    assert find_checkpoint(str(folder), root).path == folder
    assert find_checkpoint("old/checkpoints/step-00000005", root).path == folder
    assert find_checkpoint(str(folder), root).step == 5


def test_a_run_is_its_newest_checkpoint_by_path_and_by_name(root):
    newest = root / "old" / "checkpoints" / "step-00000100"  # by number: as text, step-5 would come after step-100
    assert find_checkpoint(str(root / "old"), root).path == newest
    assert find_checkpoint("old", root).path == newest
    assert find_checkpoint("demo/new", root).path.name == "step-00000007"


def test_steps_are_ordered_by_number(root):
    make_checkpoint(root / "old", 123456789)
    assert [c.step for c in Run(root / "old").checkpoints()] == [5, 100, 123456789]


def test_a_folder_of_runs_is_its_newest(root):
    assert find_checkpoint("demo", root).path.name == "step-00000007"


def test_a_recipe_is_its_newest_run(root):
    assert find_checkpoint("a", root).path == root / "demo" / "new" / "checkpoints" / "step-00000007"
    assert find_checkpoint("b", root).path.parts[-3] == "other"


def test_a_bare_name_is_the_newest_run_of_that_name_or_recipe(root):
    """An old runs/a does not hide the newer run of recipe a that the demo has just made elsewhere."""
    make_run(root / "a", "a", 0.5, (9,))
    assert find_checkpoint("a", root).step == 7
    assert find_checkpoint(str(root / "a"), root).step == 9
    make_run(root / "b", "a", 4.0, (11,))
    assert find_checkpoint("b", root).step == 11


def test_nothing_said_is_the_newest_run_of_all(root):
    assert find_checkpoint(None, root).step == 7
    make_run(root / "newest", "c", 9.0, (3,))
    assert find_checkpoint(None, root).step == 3


def test_runs_without_a_complete_checkpoint_are_passed_over(root):
    empty = make_run(root / "empty", "a", 10.0, ())
    assert find_checkpoint(None, root).step == 7
    assert find_checkpoint("a", root).step == 7
    assert newest_run(root, "a", with_checkpoint=False) == Run(empty)
    with pytest.raises(ValueError, match=r"empty has no complete checkpoint yet"):
        find_checkpoint("empty", root)


@pytest.mark.parametrize("harm", ["no manifest", "missing file", "short file"])
def test_incomplete_checkpoints_are_ignored(root, harm):
    folder = make_checkpoint(root / "old", 200)
    assert find_checkpoint("old", root).step == 200
    if harm == "no manifest":
        (folder / MANIFEST).unlink()
    elif harm == "missing file":
        (folder / "zero" / "optimizer.pt").unlink()
    else:
        os.truncate(folder / WEIGHTS, 3)
    assert not Checkpoint(folder).is_complete()
    assert find_checkpoint("old", root).step == 100


def test_a_checkpoint_that_is_still_being_written_is_not_seen(root):
    folder = make_checkpoint(root / "old", 200)
    folder.rename(folder.with_name(f".{folder.name}.writing"))
    assert find_checkpoint("old", root).step == 100


def test_a_damaged_file_is_named(root):
    folder = root / "old" / "checkpoints" / "step-00000100"
    checkpoint = find_checkpoint("old", root)
    checkpoint.check()
    content = bytearray((folder / "zero" / "optimizer.pt").read_bytes())
    content[0] ^= 1  # the size stays
    (folder / "zero" / "optimizer.pt").write_bytes(content)
    assert checkpoint.is_complete()
    with pytest.raises(ValueError, match=r"step-00000100 is damaged: zero/optimizer\.pt has changed"):
        checkpoint.check()
    (folder / "zero" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"damaged: zero/optimizer\.pt is missing"):
        checkpoint.check()
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"not a complete checkpoint: it has no manifest\.json"):
        checkpoint.check()


def test_what_is_not_there_says_how_to_make_it(root, tmp_path):
    with pytest.raises(ValueError, match=r"'aa' is neither .* train it first: deepspeed .* --recipe aa"):
        find_checkpoint("aa", root)
    with pytest.raises(ValueError, match=r"no run with a checkpoint under .*; train one: deepspeed launcher/train\.py"):
        find_checkpoint(None, tmp_path / "nowhere")


def test_a_file_that_is_no_json_is_named(root):
    (root / "old" / "run.json").write_text('{"recipe": "a", "crea')
    with pytest.raises(ValueError, match=r"old/run\.json is not readable as JSON"):
        find_checkpoint(None, root)


def test_json_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"caption": "café"})
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("replaced"))
    with pytest.raises(TypeError):
        write_json(path, {"half": object()})
    assert read_json(path) == {"caption": "café"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": [1]}', '{"files": {"x": 1}}'])
def test_what_has_a_damaged_manifest_is_passed_over(root, content):
    (make_checkpoint(root / "old", 200) / MANIFEST).write_text(content)
    assert find_checkpoint("old", root).step == 100


@pytest.mark.parametrize("content", ["[]", "{}", '{"created": null}'])
def test_a_run_that_does_not_say_when_it_began_is_named(root, content):
    (root / "old" / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"old/run\.json does not say when the run began"):
        newest_run(root)
