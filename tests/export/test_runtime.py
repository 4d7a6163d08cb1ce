from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from export.runtime import Bundle
from pipeline.evaluate import encode_split, retrieval_metrics
from pipeline.evaluate.encode import TorchEncoder
from pipeline.model import DualEncoder
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from shards.reader import ShardReader


@pytest.fixture(scope="module")
def bundle(lite0_bundle: Path) -> Bundle:
    return Bundle(lite0_bundle, threads=2)


def test_it_encodes_as_torch_does(bundle: Bundle, lite0: DualEncoder, reader: ShardReader) -> None:
    torch_encoder = TorchEncoder(
        lite0, Preprocess.from_config(lite0.spec["preprocess_cfg"]), CaptionTokenizer(lite0.spec)
    )
    pairs: Any = [reader[i] for i in range(24)]
    served, expected = encode_split(bundle, pairs, 16), encode_split(torch_encoder, pairs, 16)
    assert served.ids == expected.ids
    for own, other in ((served.image_embeds, expected.image_embeds), (served.text_embeds, expected.text_embeds)):
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, other, atol=1e-5)
    figures = [retrieval_metrics(e.image_embeds, e.text_embeds, e.owner) for e in (served, expected)]
    assert figures[0] == figures[1]


def test_tokens_are_cut_to_the_longest_caption(bundle: Bundle) -> None:
    assert bundle.tokenize(["a dog"]).shape == (1, 4)
    assert bundle.tokenize(["a dog", "a dog and a cat"]).shape == (2, 7)
    assert bundle.tokenize(["dog " * 100]).shape == (1, 64)
    assert bundle.tokenize(["a dog"]).dtype == np.int64


def test_an_empty_batch_gives_no_rows(bundle: Bundle) -> None:
    assert bundle.encode_images([]).shape == bundle.encode_texts([]).shape == (0, 384)


def test_a_broken_picture_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="not a jpeg"):
        bundle.encode_images([b"no picture at all"])


def test_the_provider_is_the_one_in_use(bundle: Bundle, lite0_bundle: Path) -> None:
    assert bundle.provider == "CPUExecutionProvider"
    if ort.get_device() == "GPU" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine may really have CUDA")
    with pytest.raises(ValueError, match="cannot use CUDAExecutionProvider on this machine; serve on the CPU"):
        Bundle(lite0_bundle, device="cuda")


def test_it_runs_without_torch(lite0_bundle: Path) -> None:
    code = f"""
import sys
import export.parity, export.serving.index, export.serving.search, export.serving.sheet
from export.runtime import Bundle
assert Bundle({str(lite0_bundle)!r}).encode_texts(["a dog"]).shape == (1, 384)
heavy = {{"torch", "open_clip", "transformers", "timm", "streaming", "onnx", "torchvision"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
