from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import export.onnx as export_onnx
from export.manifest import TEXT_GRAPH, VISION_GRAPH
from export.onnx import TEXT, VISION, export_tower, write_graphs
from pipeline.model import DualEncoder


def _session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", ["lite0", "tiny"])
def test_inputs_and_outputs(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{name}_bundle")
    model: DualEncoder = request.getfixturevalue(name)
    size, dim = model.spec["preprocess_cfg"]["size"], model.spec["model_cfg"]["embed_dim"]
    vision, text = _session(folder / VISION_GRAPH), _session(folder / TEXT_GRAPH)
    assert [(i.name, i.type, i.shape) for i in vision.get_inputs()] == [
        ("pixel_values", "tensor(float)", ["batch", 3, size, size])
    ]
    assert [(i.name, i.type, i.shape) for i in text.get_inputs()] == [
        ("input_ids", "tensor(int64)", ["batch", "length"])
    ]
    assert [(o.name, o.shape) for o in vision.get_outputs()] == [("image_embeds", ["batch", dim])]
    assert [(o.name, o.shape) for o in text.get_outputs()] == [("text_embeds", ["batch", dim])]
    for graph in (VISION_GRAPH, TEXT_GRAPH):
        proto = onnx.load(folder / graph)
        onnx.checker.check_model(proto)
        assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 18)]


@pytest.mark.parametrize("name", ["lite0", "tiny"])
@pytest.mark.parametrize(("batch", "length"), [(1, 2), (2, 5), (3, 64), (7, 11), (64, 9)])
def test_any_batch_and_length(name: str, batch: int, length: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{name}_bundle")
    model: DualEncoder = request.getfixturevalue(name)
    size = model.spec["preprocess_cfg"]["size"]
    generator = torch.Generator().manual_seed(batch)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    ids = torch.randint(1, 20000, (batch, length), generator=generator)
    ids[0, 2:] = 0  # padding, but for one row that may be all of its batch
    with torch.inference_mode():
        expected = model(pixel_values=pixels, input_ids=ids)
    image = _session(folder / VISION_GRAPH).run(None, {"pixel_values": pixels.numpy()})[0]
    text = _session(folder / TEXT_GRAPH).run(None, {"input_ids": ids.numpy()})[0]
    np.testing.assert_allclose(image, expected.image_features.numpy(), atol=1e-5)
    np.testing.assert_allclose(text, expected.text_features.numpy(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, atol=1e-5)


def test_padding_changes_nothing(lite0_bundle: Path) -> None:
    """The attention mask follows from the pad id inside the graph."""
    session = _session(lite0_bundle / TEXT_GRAPH)
    ids = np.array([[101, 1037, 3899, 102]])
    padded = np.pad(ids, ((0, 0), (0, 30)))
    np.testing.assert_allclose(
        session.run(None, {"input_ids": ids})[0], session.run(None, {"input_ids": padded})[0], atol=1e-6
    )


def test_the_same_weights_give_the_same_bytes(tiny: DualEncoder, tiny_bundle: Path, tmp_path: Path) -> None:
    """Also from a model that was left in train mode, which stays as it was."""
    fast = torch.backends.mha.get_fastpath_enabled()
    tiny.train()
    try:
        write_graphs(tiny, tmp_path)
        assert tiny.training
        assert torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        tiny.eval()
    for graph in (VISION_GRAPH, TEXT_GRAPH):
        assert (tmp_path / graph).read_bytes() == (tiny_bundle / graph).read_bytes()


def test_weights_beyond_the_limit_of_one_file_go_beside_it(
    tiny: DualEncoder, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_onnx, "_MAX_WEIGHT_BYTES", 1000)
    export_onnx._save(onnx.load(tiny_bundle / VISION_GRAPH), tmp_path / "made" / VISION.file)
    (tmp_path / "made").rename(tmp_path / "moved")
    folder = (tmp_path / "moved" / VISION.file).parent
    assert sorted(file.name for file in folder.iterdir()) == ["vision_model.onnx", "vision_model.onnx_data"]
    pixels = torch.ones(3, 3, 64, 64)
    with torch.inference_mode():
        expected = tiny.encode_image(pixels, normalize=True).numpy()
    actual = _session(tmp_path / "moved" / VISION.file).run(None, {"pixel_values": pixels.numpy()})[0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_only_fp32_on_the_cpu_is_exported(tiny: DualEncoder) -> None:
    with pytest.raises(ValueError, match=r"fp32 weights on the CPU, but .* is torch.bfloat16"):
        export_tower(copy.deepcopy(tiny).bfloat16(), TEXT)
