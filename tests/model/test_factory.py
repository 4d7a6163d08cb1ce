"""Building models by name: what is found, what is refused, and what the message says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from pipeline.config import ModelConfig
from pipeline.model import build_model, packaged
from tests.fixtures import minilm_text_cfg, write_tiny_clip


class Distribution:
    """An installed package whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, inside: str) -> Path:
        return self.folder / inside


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "distribution", lambda name: Distribution(tmp_path))
    return tmp_path


def tower() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2))


def write_weights(path: Path, tensors: list[torch.Tensor]) -> str:
    torch.save({f"theirs.{number}": tensor for number, tensor in enumerate(tensors)}, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


OTHERS = [torch.rand(2, 1, 1, 1), *(torch.rand(2) for _ in range(4))]


@pytest.mark.parametrize(
    ("name", "near"), [("lite0-minlm", "lite0-minilm"), ("ViT-B-23", "ViT-B-32"), ("RN-50", "RN50")]
)
def test_an_unknown_model_names_the_nearest_of_both_kinds(name, near):
    known = [near, *open_clip.list_models()]
    with pytest.raises(ValueError, match=rf"no model '{name}' .*did you mean '([^']+)'\?") as raised:
        build_model(ModelConfig(name=name))
    suggested = str(raised.value).split("did you mean '")[1].rstrip("'?")
    assert suggested in known
    if near == "lite0-minilm":
        assert suggested == near


def test_unknown_weights_of_a_known_model_are_a_value_error():
    with pytest.raises(ValueError, match=r"model 'RN50': .*nonsense"):
        build_model(ModelConfig(name="RN50", pretrained="nonsense"))


def test_pretrained_is_refused_where_the_config_states_its_weights(tmp_path):
    with pytest.raises(ValueError, match=r"model.pretrained is for open_clip names"):
        build_model(ModelConfig(name=write_tiny_clip(tmp_path / "tiny.json"), pretrained="openai"))


def test_a_longer_context_stretches_the_table_and_a_tower_without_one_is_refused(tmp_path):
    name = write_tiny_clip(tmp_path / "tiny.json")
    assert build_model(ModelConfig(name=name, context_length=20)).context_length == 20
    model = build_model(ModelConfig(name=name, context_length=21, keep_positions=10))
    assert model.context_length == model.spec["model_cfg"]["text_cfg"]["context_length"] == 21
    with pytest.raises(ValueError, match=r"keep_positions is 20, but of 20 positions"):
        build_model(ModelConfig(name=name, context_length=21))
    name = write_tiny_clip(tmp_path / "bert.json", **minilm_text_cfg())
    assert build_model(ModelConfig(name=name, context_length=21)).context_length == 21, "MiniLM has 512 positions"
    with pytest.raises(ValueError, match=r"513.* 512"):
        build_model(ModelConfig(name=name, context_length=513))


def test_another_image_size_is_built_and_written_down(tmp_path):
    model = build_model(ModelConfig(name=write_tiny_clip(tmp_path / "tiny.json"), image_size=64))
    assert model.clip.visual.positional_embedding.shape[0] == (64 // 16) ** 2 + 1
    assert model.spec["model_cfg"]["vision_cfg"]["image_size"] == 64
    assert model.spec["preprocess_cfg"]["size"] == 64
    assert model(pixel_values=torch.zeros(1, 3, 64, 64)).image_features.shape == (1, 16)


def test_building_leaves_open_clips_own_registry_alone(monkeypatch):
    before = json.dumps(open_clip.get_model_config("RN50"), sort_keys=True)
    monkeypatch.setattr("pipeline.model.factory._create", lambda *_, **__: FakeClip())
    model = build_model(ModelConfig(name="RN50", image_size=128))
    assert model.spec["model_cfg"]["vision_cfg"]["image_size"] == 128
    assert json.dumps(open_clip.get_model_config("RN50"), sort_keys=True) == before


class FakeClip(nn.Module):
    """What `_wrap` looks at, without 100 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.visual = nn.Identity()
        self.visual.preprocess_cfg = {"size": (128, 128), "mean": [0.5] * 3, "std": [0.5] * 3}
        self.text = nn.Identity()


# weights in packages --------------------------------------------------------------------------------------------------


def test_weights_are_loaded_in_order_and_the_classifier_may_be_absent(package):
    digest = write_weights(package / "w.pth", [*OTHERS, torch.rand(7, 2), torch.rand(7)])
    module = tower()
    packaged.load_in_order(module, "package:some/w.pth", digest)
    conv, norm = module
    loaded = [conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var]
    assert all(torch.equal(own, theirs) for own, theirs in zip(loaded, OTHERS, strict=True))


def test_another_file_than_expected_is_refused(package):
    write_weights(package / "w.pth", OTHERS)
    module = tower()
    before = module[0].weight.clone()
    with pytest.raises(ValueError, match=r"w\.pth has sha256 [0-9a-f]{64}, expected 0{64}"):
        packaged.load_in_order(module, "package:some/w.pth", "0" * 64)
    assert torch.equal(module[0].weight, before)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.rand(2, 1, 3, 3), *OTHERS[1:]], r"0\.weight is \(2, 1, 1, 1\) here but \(2, 1, 3, 3\)"),
        (OTHERS[:3], r"w\.pth holds 3 tensors, this tower has 5"),
    ],
    ids=["shape", "too few"],
)
def test_a_file_that_does_not_fit_is_refused(package, tensors, message):
    digest = write_weights(package / "w.pth", tensors)
    with pytest.raises(ValueError, match=message):
        packaged.load_in_order(tower(), "package:some/w.pth", digest)


def test_a_package_that_is_not_installed_says_what_to_install(tmp_path):
    name = write_tiny_clip(tmp_path / "tiny.json", hf_model_name="package:no-such-towers/model")
    with pytest.raises(
        FileNotFoundError, match=r"'no-such-towers', which is not installed: pip install no-such-towers"
    ):
        build_model(ModelConfig(name=name))


def test_a_file_that_the_package_does_not_hold_is_named(package):
    with pytest.raises(FileNotFoundError, match=r"'some' is installed but holds no 'in/side\.pth'"):
        packaged.packaged_path("package:some/in/side.pth")
