"""Features per patch and per word: those of the towers' own intermediate outputs, and who has none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipeline.model import DualEncoder
from pipeline.model.factory import build_from_spec
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import check_tokens
from tests.fixtures import minilm_text_cfg
from tests.train.tiny import MODEL

CAPTIONS = ["a dog!", "two red dogs in a green field", ""]


def _model(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> DualEncoder:
    spec = copy.deepcopy(MODEL)
    if vision and "timm_model_name" in vision:
        spec["model_cfg"]["vision_cfg"] = vision  # type: ignore[index]
    else:
        spec["model_cfg"]["vision_cfg"].update(vision or {})  # type: ignore[index]
    spec["model_cfg"]["text_cfg"].update(text or {})  # type: ignore[index]
    torch.manual_seed(0)
    return build_from_spec(spec).eval()


def _pixels(size: int = 32) -> torch.Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"final_ln_after_pool": True}, {"pool_type": "avg"}])
def test_patches_of_an_open_clip_vit(options: dict[str, Any]) -> None:
    """open_clip's intermediate outputs, normed and projected by hand; the class token is not among them."""
    model = _model(options)
    visual: Any = model.clip.visual
    features = model(_pixels(), tokens=True)
    last = visual.forward_intermediates(_pixels(), indices=[1], normalize_intermediates=True, output_fmt="NLC")
    expected = F.normalize(last["image_intermediates"][0] @ visual.proj, dim=-1)
    assert expected.shape == (3, 16, 16)
    torch.testing.assert_close(features.image_tokens, expected)
    torch.testing.assert_close(features.image_features, model(_pixels()).image_features)


def test_words_of_an_open_clip_text_tower() -> None:
    model = _model()
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    features = model(input_ids=ids, tokens=True)
    text: Any = model.clip.text
    whole = F.pad(ids, (0, 24 - ids.shape[1]))  # open_clip's own method wants the whole context
    last = text.forward_intermediates(whole, indices=[1], normalize_intermediates=True, output_fmt="NLC")
    words = last["text_intermediates"][0][:, : ids.shape[1]]
    expected = F.normalize(words @ text.text_projection, dim=-1)
    torch.testing.assert_close(features.text_tokens, expected)
    torch.testing.assert_close(features.text_features, model(input_ids=ids).text_features)
    # "a dog !" has three tokens, whose last has the id of CLIP's padding; "" has none.
    assert features.text_mask.sum(1).tolist() == [3, 7, 0]
    assert not features.text_mask[:, 0].any()
    assert features.text_mask[0].tolist() == [False, True, True, True, *[False] * (ids.shape[1] - 4)]


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_patches_of_a_timm_vit(pool: str) -> None:
    """Pooled by their mean, patches before the head average to the pooled feature."""
    config = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": pool, "timm_proj": "linear", "image_size": 224}
    model = _model(config)
    visual: Any = model.clip.visual
    pixels = _pixels(224)
    features = model(pixels, tokens=True)
    assert features.image_tokens.shape == (3, 196, 16)
    torch.testing.assert_close(features.image_features, model(pixels).image_features)
    last = visual.trunk.forward_intermediates(pixels, indices=[11], norm=False, output_fmt="NLC")[1][0]
    expected = visual.head(visual.trunk.fc_norm(visual.trunk.norm(last)))
    torch.testing.assert_close(features.image_tokens, F.normalize(expected, dim=-1))


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_places_of_a_convolutional_trunk(name: str) -> None:
    """A picture of one place is its own pooled feature; of more, a linear head averages."""
    model = _model({"timm_model_name": name, "timm_pool": "avg", "timm_proj": "linear", "image_size": 64})
    visual: Any = model.clip.visual
    features = model(_pixels(64), tokens=True)
    assert features.image_tokens.shape == (3, 4, 16)
    torch.testing.assert_close(features.image_features, model(_pixels(64)).image_features)
    one = model(_pixels(32), tokens=True)
    torch.testing.assert_close(one.image_tokens[:, 0], one.image_features)
    if name == "resnet18":
        places = visual.trunk.forward_features(_pixels(64)).flatten(2).transpose(1, 2)
        torch.testing.assert_close(features.image_tokens, F.normalize(visual.head(places), dim=-1))


def test_words_of_a_hugging_face_tower() -> None:
    """The default model's: its last hidden states through its projection, between [CLS] and [SEP]."""
    model = _model(text={**minilm_text_cfg(), "context_length": 64})
    text: Any = model.clip.text
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    features = model(input_ids=ids, tokens=True)
    hidden = text.transformer(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    torch.testing.assert_close(features.text_tokens, F.normalize(text.proj(hidden), dim=-1))
    assert features.text_mask.sum(1).tolist() == [3, 7, 0]
    torch.testing.assert_close(features.text_features, model(input_ids=ids).text_features)


@pytest.mark.parametrize(
    "vision",
    [
        {"timm_model_name": "resnet18", "timm_pool": "rot_attn", "timm_proj": "", "image_size": 224},
        {"attentional_pool": True},
        {"layers": [1, 1, 1, 1], "width": 16},
    ],
)
def test_towers_that_pool_by_attention_are_refused(vision: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gives no features per token .* train a model whose towers do"):
        check_tokens(_model(vision).clip)


def test_the_towers_of_the_other_tests_are_accepted() -> None:
    check_tokens(_model().clip)
