"""The dual encoder: its temperature, what stays in eval mode, and weights that open_clip itself can load."""

from __future__ import annotations

import json
import math

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.model.dual_encoder import DualEncoder
from pipeline.model.factory import build_from_spec
from pipeline.model.freeze import set_trainable
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.runs import MODEL_CONFIG, WEIGHTS
from tests.fixtures import tiny_clip

RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
CAPTIONS = ["a red bus", "two dogs that run on wet sand, seen from above", "!"]


@pytest.fixture
def model(tmp_path) -> DualEncoder:
    return tiny_clip(tmp_path)


def pixels(size: int = 32) -> torch.Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def set_scale(model: DualEncoder, scale: float) -> nn.Parameter:
    parameter = model.clip.logit_scale
    assert isinstance(parameter, nn.Parameter)
    with torch.no_grad():
        parameter.fill_(math.log(scale))
    return parameter


# the temperature ------------------------------------------------------------------------------------------------------


def test_a_new_model_has_clips_own_temperature_of_shape_1(model):
    assert model.clip.logit_scale.shape == (1,)
    assert model().logit_scale.item() == pytest.approx(1 / 0.07, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, 1.0), (99.9, 99.9), (100.0, 100.0), (101.0, 100.0), (1e6, 100.0)]
)
def test_forward_bounds_the_scale_at_100(model, scale, expected):
    set_scale(model, scale)
    assert model().logit_scale.item() == pytest.approx(expected, rel=1e-6)


def test_below_the_bound_the_gradient_is_that_of_exp(model):
    parameter = set_scale(model, 20.0)
    for sign in (1.0, -1.0):
        parameter.grad = None
        (sign * model().logit_scale).sum().backward()
        assert parameter.grad.item() == pytest.approx(sign * 20.0, rel=1e-6)  # d exp(x) / dx


def test_above_the_bound_only_the_way_back_has_a_gradient(model):
    parameter = set_scale(model, 150.0)
    model().logit_scale.sum().backward()  # a loss that falls with the scale
    assert parameter.grad.item() == pytest.approx(100.0, rel=1e-6)
    parameter.grad = None
    (-model().logit_scale).sum().backward()  # a loss that wants more
    assert parameter.grad.item() == 0.0


def test_descent_stays_at_the_bound_and_comes_back_at_once(model):
    parameter = set_scale(model, 99.0)
    optimizer = torch.optim.SGD([parameter], lr=2e-4)
    scales = []
    for sign in [-1.0] * 6 + [1.0] * 3:
        scales.append(model().logit_scale.item())
        optimizer.zero_grad()
        (sign * model().logit_scale).sum().backward()
        optimizer.step()
    assert max(scales) <= 100 * (1 + 1e-6)
    assert scales[5] == pytest.approx(100.0, rel=1e-6)
    assert scales[-1] < 99.0


def test_the_scale_is_fp32_in_a_bf16_model(model):
    set_scale(model.bfloat16(), 100.0)
    scale = model().logit_scale
    assert scale.dtype == torch.float32
    # In bf16 the nearest log to ln 100 = 4.6052 is 4.59375; its exp must not be rounded to bf16 (98.5) again.
    assert scale.item() == pytest.approx(math.exp(4.59375), rel=1e-6)


# features -------------------------------------------------------------------------------------------------------------


def test_features_are_normalised_and_a_missing_modality_is_none(model):
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    both, image, text = model(pixels(), ids), model(pixel_values=pixels()), model(input_ids=ids)
    for features in (both.image_features, both.text_features):
        assert features.shape == (3, 16)
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(3))
    assert image.text_features is None
    assert text.image_features is None
    torch.testing.assert_close(both.image_features, image.image_features)
    torch.testing.assert_close(both.text_features, text.text_features)


# what stays in eval mode ----------------------------------------------------------------------------------------------


def test_frozen_modules_stay_in_eval_mode(model):
    set_trainable(model.clip, ["text.transformer.resblocks.1.*", "logit_scale"])
    model.train()
    assert model.training
    blocks = model.clip.text.transformer.resblocks
    assert not any(module.training for module in model.clip.visual.modules())
    assert not any(module.training for module in blocks[0].modules())
    assert all(module.training for module in blocks[1].modules())
    assert not any(module.training for module in model.eval().modules())


def test_batch_norms_stay_in_eval_mode_even_when_they_train(tmp_path):
    model = tiny_clip(tmp_path, RESNET)
    set_trainable(model.clip, ["*"])
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    model.train()
    assert norms
    assert not any(norm.training for norm in norms)
    assert model.clip.visual.layer1.training
    model(pixels(64)).image_features.sum().backward()
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    assert any(norm.weight.grad is not None for norm in norms)


# trainable patterns ---------------------------------------------------------------------------------------------------


def test_trainable_patterns_select_by_name_and_count_scalars(model):
    patterns = ["text.text_projection", "*.resblocks.1.*", "logit_scale"]
    training, frozen = set_trainable(model.clip, patterns)
    chosen = {name for name, p in model.clip.named_parameters() if p.requires_grad}
    expected = {
        name
        for name, _ in model.clip.named_parameters()
        if name in ("text.text_projection", "logit_scale") or ".resblocks.1." in name
    }
    assert chosen == expected
    assert training == sum(p.numel() for name, p in model.clip.named_parameters() if name in expected)
    assert training + frozen == sum(p.numel() for p in model.clip.parameters())


def test_everything_trains_again_after_a_narrower_choice(model):
    set_trainable(model.clip, ["logit_scale"])
    assert set_trainable(model.clip, ["*"])[1] == 0


def test_a_pattern_that_matches_nothing_is_named_with_examples(model):
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=r"'text\.proj\.\*' matches no parameter; names begin with .*text\.ln_final"):
        set_trainable(model.clip, ["logit_scale", "text.proj.*"])
    assert [p.requires_grad for p in model.parameters()] == before


# weights --------------------------------------------------------------------------------------------------------------


def test_encoder_state_round_trips_into_a_model_of_the_same_spec(model):
    set_scale(model, 33.0)
    again = build_from_spec(json.loads(json.dumps(model.spec))).eval()
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    assert not torch.equal(again(input_ids=ids).text_features, model(input_ids=ids).text_features)
    again.load_encoder_state(model.encoder_state())
    for ours, theirs in zip(again(pixels(), ids)[:3], model(pixels(), ids)[:3], strict=True):
        assert torch.equal(ours, theirs)
    assert again.clip.logit_scale.shape == (1,)
    assert json.dumps(again.spec, sort_keys=True) == json.dumps(model.spec, sort_keys=True)


@pytest.mark.parametrize("vision", [None, RESNET], ids=["vit", "resnet"])
def test_open_clip_itself_loads_the_state_and_gives_the_same_features(tmp_path, vision):
    model = tiny_clip(tmp_path, vision)
    set_scale(model, 33.0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = model.encoder_state()
    assert state["logit_scale"].shape == ()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
    (folder / MODEL_CONFIG).write_text(json.dumps(model.spec))
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    theirs.eval()
    assert theirs.logit_scale.shape == ()
    assert theirs.logit_scale.exp().item() == pytest.approx(33.0, rel=1e-6)
    size = model.clip.visual.preprocess_cfg["size"]
    side = size[0] if isinstance(size, tuple) else size
    assert model.spec["preprocess_cfg"]["size"] == side
    assert f"size={side}" in str(transform)
    with torch.no_grad():
        ours = model(pixels(side), CaptionTokenizer(model.spec)(CAPTIONS))
        torch.testing.assert_close(theirs.encode_image(pixels(side), normalize=True), ours.image_features)
        torch.testing.assert_close(theirs.encode_text(tokenizer(CAPTIONS), normalize=True), ours.text_features)


def test_weights_of_another_model_are_refused_by_name(model, tmp_path):
    state = model.encoder_state()
    for wrong in (
        {k: v for k, v in state.items() if k != "text.ln_final.weight"},
        {**state, "text.ln_final.weight": torch.zeros(3)},
        {**state, "text.ln_final.extra": torch.zeros(3)},
    ):
        before = model.encoder_state()["text.ln_final.bias"].clone()
        with pytest.raises(ValueError, match=r"do not fit the model: 1 tensors .*text\.ln_final"):
            model.load_encoder_state(wrong)
        assert torch.equal(model.encoder_state()["text.ln_final.bias"], before)
