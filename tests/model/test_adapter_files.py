"""Adapters in recipes, and in files of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config import load_recipe
from pipeline.model import DualEncoder
from pipeline.model.adapters import adapter_files, load_adapter, merge_adapters
from pipeline.model.adapters.attention import split_attentions
from pipeline.runs import write_json
from pipeline.sections import AdapterConfig
from tests.model.adapting import adapted, backbone, features, move, trains

# recipes --------------------------------------------------------------------------------------------------------------


def test_a_word_in_a_recipe():
    assert load_recipe("default").adapters == AdapterConfig(name="none")
    assert load_recipe("default", ["adapters=lora"]).adapters == AdapterConfig(name="lora", r=16, alpha=16)
    assert load_recipe("lora", ["adapters.r=8", "adapters=dora"]).adapters.name == "dora"
    dora = load_recipe("dora", ["adapters.r=8", "adapters.targets=[mlp]"])
    assert dora.adapters == AdapterConfig(name="dora", r=8, targets=["mlp"])
    assert load_recipe("dora", ["adapters=none"]).adapters.name == "none"
    assert load_recipe("lora").objective == load_recipe("default").objective


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapters=lorra", r"'adapters.name': Input should be 'none', 'lora' or 'dora'"),
        ("adapters.alpa=3", r"unknown key 'adapters.alpa'; did you mean 'alpha'\?"),
        ("adapters.r=0", r"'adapters.r': Input should be greater than 0"),
        ("adapters.targets=[]", r"'adapters.targets': List should have at least 1 item"),
    ],
)
def test_what_a_recipe_gets_wrong_is_said(override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("lora", [override])


# files ----------------------------------------------------------------------------------------------------------------


def write(model: DualEncoder, folder: Path) -> Path:
    """As a checkpoint writes them."""
    trained = {name: p.detach().clone() for name, p in model.clip.named_parameters() if p.requires_grad}
    files = adapter_files(model, {**trained, "framework.scale": torch.ones(1)})
    folder.mkdir()
    for name, tensors in files.tensors.items():
        save_file(tensors, folder / name)
    for name, content in files.json.items():
        write_json(folder / name, content)
    return folder


@pytest.mark.parametrize(("kind", "towers"), [("lora", "plain"), ("dora", "plain"), ("dora", "convolutions and BERT")])
def test_saved_adapters_go_onto_the_backbone_again(kind, towers, tmp_path):
    model = adapted(kind, towers, targets=["attention", "text.*dense"] if "BERT" in towers else ["attention"])
    move(model)
    folder = write(model, tmp_path / "adapter")
    again = backbone(towers)
    load_adapter(again, folder)
    for one, two in zip(features(again), features(model), strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert trains(again) == trains(model)
    assert torch.equal(again.logit_scale(), model.logit_scale())
    merge_adapters(again)
    for name, tensor in model.encoder_state().items():
        assert torch.equal(again.encoder_state()[name], tensor), name


def test_peft_itself_loads_the_files(tmp_path):
    from peft import PeftModel

    model = adapted("dora")
    move(model)
    theirs = backbone()
    split_attentions(theirs.clip)
    theirs.clip = PeftModel.from_pretrained(theirs.clip, str(write(model, tmp_path / "adapter"))).base_model.model
    for one, two in zip(features(theirs), features(model), strict=True):
        torch.testing.assert_close(one, two, atol=0, rtol=0)


def test_adapters_are_refused_by_another_backbone(tmp_path):
    model = adapted()
    folder = write(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="the model has adapters already"):
        load_adapter(model, folder)
    other = backbone()
    with torch.no_grad():
        other.clip.get_parameter("text.ln_final.bias")[0] += 1e-6
    with pytest.raises(ValueError, match=r"was trained on other weights than this model's: build it as the run's"):
        load_adapter(other, folder)
    with pytest.raises(ValueError, match=r"is of another model: this one has no layer visual.transformer"):
        load_adapter(backbone("convolutions and BERT"), folder)
    shutil.copytree(folder, tmp_path / "half", ignore=lambda *_: ["beside.safetensors"])
    with pytest.raises(FileNotFoundError, match=r"half holds no adapters: beside.safetensors missing"):
        load_adapter(backbone(), tmp_path / "half")
