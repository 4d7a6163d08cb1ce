from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import export.bundle as export_bundle_module
import export.parity as export_parity
from export.bundle import check_bundle, export_bundle, load_manifest
from export.runtime import Bundle
from pipeline.model import DualEncoder
from tests.export.conftest import META

FILES = {
    *("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "manifest.json"),
    *("onnx/text_model.onnx", "onnx/vision_model.onnx"),
}
# Traces of a machine: absolute paths, Python files, stack traces. Long enough that weights do not hold them by chance.
TRACES = re.compile(rb"/home/|/root/|/tmp/|/usr/|site-packages|[a-z_/]{6}\.py\b|Traceback|stack_trace|pkg\.torch")


def _files(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def quick_export(
    tiny: DualEncoder, tiny_bundle: Path, tiny_pairs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], Any]:
    """Export the tiny model again, its graphs copied from the first time."""

    def copy_graphs(model: DualEncoder, folder: Path, opset: int) -> None:
        shutil.copytree(tiny_bundle / "onnx", folder / "onnx")

    monkeypatch.setattr(export_bundle_module, "write_graphs", copy_graphs)
    return lambda out: export_bundle(tiny, META, out, tiny_pairs)


@pytest.fixture
def other_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference comes from other weights than the graphs."""
    original = export_bundle_module.write_reference

    def perturbed(model: DualEncoder, pairs: Any, path: Path) -> None:
        weight = model.clip.text.text_projection  # type: ignore[union-attr]
        assert isinstance(weight, torch.Tensor)
        before = weight.detach().clone()
        with torch.no_grad():
            weight[0] += 0.1
            original(model, pairs, path)
            weight.copy_(before)

    monkeypatch.setattr(export_bundle_module, "write_reference", perturbed)


@pytest.mark.parametrize("name", ["lite0", "tiny"])
def test_what_lies_in_it(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{name}_bundle")
    model: DualEncoder = request.getfixturevalue(name)
    assert set(_files(folder)) == FILES
    manifest = check_bundle(folder)
    assert set(manifest["files"]) == FILES - {"manifest.json"}
    assert manifest["source"] == {"run": "runs/demo", "recipe": "default", "step": 12, "epoch": 3}
    assert manifest["model"]["model_cfg"] == model.spec["model_cfg"]
    assert manifest["context_length"] == model.context_length
    assert manifest["embed_dim"] == model.spec["model_cfg"]["embed_dim"]
    assert manifest["opset"] == 18
    assert manifest["optimization_level"] == "ORT_ENABLE_ALL"
    assert manifest["versions"]["torch"] == torch.__version__.split("+")[0]
    parity = manifest["parity"]
    assert parity["token_ids_equal"]
    assert parity["pixels_max_abs_diff"] < 1e-6
    assert set(parity["embeddings_max_abs_diff"]) == {"1", "2", "3", "7", "64", "all"}
    assert max(parity["image_max_abs_diff"], parity["text_max_abs_diff"]) < 1e-5
    assert all(direction["different"] == 0 for direction in parity["ranks"].values())


@pytest.mark.parametrize("name", ["lite0", "tiny"])
def test_nothing_tells_of_the_machine(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{name}_bundle")
    here = str(Path(__file__).parents[2]).encode()
    for file, content in _files(folder).items():
        if file == "tokenizer.json":  # a vocabulary may hold any word
            continue
        assert not (found := TRACES.search(content)), f"{file}: {content[found.start() - 30 : found.end() + 60]!r}"
        assert here not in content


def test_absolute_paths_in_a_specification_are_cut() -> None:
    spec = {"text_cfg": {"hf_model_name": "/home/someone/models/bert"}, "sizes": [1, "/a/b"], "pool": "avg"}
    cut = {"text_cfg": {"hf_model_name": "bert"}, "sizes": [1, "b"], "pool": "avg"}
    assert export_bundle_module._without_paths(spec) == cut


def test_an_old_bundle_is_replaced_by_the_same_bytes(
    quick_export: Callable[[Path], Any], tiny_bundle: Path, tmp_path: Path
) -> None:
    """Even a damaged one, and whatever else lies in it."""
    out = tmp_path / "again"
    shutil.copytree(tiny_bundle, out)
    (out / "onnx" / "text_model.onnx").write_bytes(b"")
    (out / "leftover").write_bytes(b"")
    report = quick_export(out)
    assert os.listdir(tmp_path) == ["again"]
    first, second = _files(tiny_bundle), _files(out)
    assert set(second) == FILES
    assert {name for name in first if first[name] != second[name]} <= {"manifest.json"}
    manifests = [json.loads(files["manifest.json"]) for files in (first, second)]
    for manifest in manifests:
        del manifest["parity"]  # its differences may depend on the load of the machine
    assert manifests[0] == manifests[1]
    assert (report.path, report.pairs, report.size) == (out, 10, sum(map(len, second.values())))


def test_a_bundle_works_where_it_is_moved(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert Bundle("elsewhere").encode_texts(["a dog"]).shape == (1, 48)


@pytest.mark.parametrize("name", sorted(FILES - {"manifest.json"}))
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_file_is_named(name: str, damage: str, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "delete":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(ValueError, match=rf"damaged: {re.escape(name)} (has|is).*pipeline export --onnx"):
        check_bundle(folder)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder; make one: pipeline export --onnx"):
        load_manifest(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"is not a bundle: it has no manifest.json"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"step": 3, "files": {}}')
    with pytest.raises(ValueError, match="is that of something else"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "hn-clip-bundle", "format_version": 99}')
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "hn-clip-')
    with pytest.raises(ValueError, match="not readable as JSON"):
        load_manifest(tmp_path)


def test_other_folders_are_not_replaced(quick_export: Callable[[Path], Any], tmp_path: Path) -> None:
    """A checkpoint has a manifest.json as well."""
    (tmp_path / "manifest.json").write_text('{"step": 3, "files": {}}')
    with pytest.raises(ValueError, match="is not a bundle, so it is not replaced"):
        quick_export(tmp_path)
    assert os.listdir(tmp_path) == ["manifest.json"]


@pytest.mark.usefixtures("other_reference")
@pytest.mark.parametrize("there", [False, True])
def test_failing_parity_changes_nothing(
    there: bool, quick_export: Callable[[Path], Any], tiny_bundle: Path, tmp_path: Path
) -> None:
    if there:
        shutil.copytree(tiny_bundle, tmp_path / "bundle")
    before = _files(tmp_path)
    with pytest.raises(ValueError, match=r"differ from torch.*text embeddings at batch 1 differ by up to \d.\de-0\d"):
        quick_export(tmp_path / "bundle")
    assert os.listdir(tmp_path) == (["bundle"] if there else [])
    assert _files(tmp_path) == before


def test_a_crash_of_onnxruntime_is_reported(
    quick_export: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(export_parity, "_CHILD", (sys.executable, "-c", crash))
    with pytest.raises(ValueError, match=r"crashed \(SIGSEGV\) on the exported graphs at ORT_ENABLE_ALL"):
        quick_export(tmp_path / "bundle")
    assert os.listdir(tmp_path) == []


def test_a_child_that_cannot_run_is_reported(
    quick_export: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_parity, "_CHILD", (sys.executable, "-c", "raise ImportError('no such thing')"))
    with pytest.raises(ValueError, match=r"could not run \(exit code 1\): ImportError: no such thing"):
        quick_export(tmp_path / "bundle")


def test_no_pairs_no_bundle(tiny: DualEncoder, quick_export: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        export_bundle(tiny, META, tmp_path / "bundle", [])
    assert os.listdir(tmp_path) == []
