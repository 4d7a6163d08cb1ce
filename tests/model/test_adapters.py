"""Adapters train in place of the layers they stand on, and vanish into them: formulas, names, shapes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transformer import Attention
from torch import Tensor, nn

from pipeline.model import DualEncoder
from pipeline.model.adapters import adapt, merge_adapters
from pipeline.model.adapters.attention import pack_attention, split_attentions
from pipeline.model.memory import checkpoint_gradients
from pipeline.sections import AdapterConfig, FreezeConfig
from tests.model.adapting import PLAIN, TOWERS, adapted, backbone, features, inputs, move, trains


def anatomy(model: DualEncoder) -> list[Any]:
    """Modules with their kinds, and weights with their shapes."""
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return [*modules, *((name, tensor.shape) for name, tensor in model.encoder_state().items())]


# attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "per head"])
@pytest.mark.parametrize("kind", ["torch", "sequence first", "other keys", "open_clip"])
def test_attention_taken_apart_computes_the_same_and_packs_again(kind, mask):
    if kind == "open_clip":
        module: nn.Module = Attention(16, 4, qk_norm=True, scale_heads=True, inner_norm=True, norm_layer=nn.LayerNorm)
    else:
        widths = {"kdim": 12, "vdim": 12} if kind == "other keys" else {}
        module = nn.MultiheadAttention(16, 4, batch_first=kind != "sequence first", **widths)
    module = module.double().train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    query = torch.randn(3, 5, 16, dtype=torch.float64)
    keys = torch.randn(3, 5, 12, dtype=torch.float64) if kind == "other keys" else query
    masks = {
        "none": None,
        "causal": torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1),
        "bool": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "per head": torch.randn(12, 5, 5, dtype=torch.float64),
    }

    def run() -> Tensor:
        if kind == "open_clip":
            return module(query, attn_mask=masks[mask])
        q, k = (x.transpose(0, 1) if kind == "sequence first" else x for x in (query, keys))
        out = module(q, k, k, need_weights=False, attn_mask=masks[mask])[0]
        return out.transpose(0, 1) if kind == "sequence first" else out

    before, state, whole = run(), copy.deepcopy(module.state_dict()), nn.ModuleDict({"attn": module})
    (packed,) = split_attentions(whole)
    assert {name for name, _ in module.named_parameters()} >= {f"{p}_proj.weight" for p in ("q", "k", "v", "out")}
    torch.testing.assert_close(run(), before, atol=1e-12, rtol=0)
    pack_attention(whole, packed)
    again = module.state_dict()
    assert list(again) == list(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    torch.testing.assert_close(run(), before, atol=0, rtol=0)


# merging --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "towers"), [*(("lora", towers) for towers in TOWERS), ("dora", "plain"), ("dora", "convolutions and BERT")]
)
def test_merged_features_are_the_unmerged_ones_and_the_backbone_has_its_own_parts_again(kind, towers):
    model = backbone(towers)
    before, parts = features(model), anatomy(model)
    adapt(model, AdapterConfig(name=kind, r=4, targets=["attention", "mlp"]), **PLAIN)
    for now, was in zip(features(model), before, strict=True):
        torch.testing.assert_close(now, was, atol=1e-6, rtol=0)  # a new adapter changes nothing
    move(model)
    unmerged = features(model)
    assert (unmerged[1] - before[1]).abs().max() > 0.05
    merge_adapters(model)
    for merged, now in zip(features(model), unmerged, strict=True):
        torch.testing.assert_close(merged, now, atol=1e-5, rtol=0)
    assert anatomy(model) == parts


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_follow_the_formula(kind):
    """A loop over the rows, in float64, for the keys of a packed attention; scale 6 / 4."""
    base = backbone().encoder_state()["text.transformer.resblocks.1.attn.in_proj_weight"]
    model = adapted(kind, targets=["text.*.1.attn.[kv]_proj"])
    move(model)
    at = "text.transformer.resblocks.1.attn.k_proj"
    live = {name: parameter.detach().double().numpy() for name, parameter in model.clip.named_parameters()}
    a, b = (live[f"{at}.{side}.default.weight"] for side in ("lora_A", "lora_B"))
    expected = base.double().numpy().copy()  # queries and values' other rows as they were
    for row in range(32):
        updated = base.double().numpy()[32 + row] + 6 / 4 * sum(b[row, k] * a[k] for k in range(4))
        if kind == "dora":
            updated = live[f"{at}.lora_magnitude_vector.default.weight"][row] * updated / np.sqrt((updated**2).sum())
        expected[32 + row] = updated
    merged = model.encoder_state()["text.transformer.resblocks.1.attn.in_proj_weight"].numpy()
    np.testing.assert_allclose(merged[:64], expected[:64], atol=1e-6)
    assert np.abs(merged[64:] - expected[64:]).max() > 0.01, "values are adapted as well"


def test_gradients_of_an_adapter_are_those_of_the_weight_it_updates():
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, with dL/dW of the merged model."""
    model = adapted(targets=["attention", "mlp"]).eval()
    move(model)
    merged = copy.deepcopy(model)
    merge_adapters(merged)
    for one in (model, merged):
        one.requires_grad_(True)
        found = one(*inputs(one))
        (found.image_features[:, 0].sum() + (found.text_features[0] * found.image_features[1]).sum()).backward()
    names = {"visual.transformer.resblocks.0.mlp.c_proj": None, "text.transformer.resblocks.1.attn.q_proj": 0}
    for name, part in names.items():
        layer: Any = model.clip.get_submodule(name)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        of = f"{name}.weight" if part is None else name.replace("q_proj", "in_proj_weight")
        weight = merged.clip.get_parameter(of)
        assert weight.grad is not None
        grad = weight.grad if part is None else weight.grad.chunk(3)[part]
        torch.testing.assert_close(b.grad, 1.5 * grad @ a.detach().T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(a.grad, 1.5 * b.detach().T @ grad, atol=1e-5, rtol=1e-4)


# what is adapted, and what trains -------------------------------------------------------------------------------------


def test_words_and_patterns_mean_layers():
    def layers(*targets: str, towers: str = "plain") -> set[str]:
        model = adapted(towers=towers, targets=list(targets))
        assert model.adapters is not None
        return set(model.adapters.layers)

    parts = ("q_proj", "k_proj", "v_proj", "out_proj")
    blocks = [f"{tower}.transformer.resblocks.{k}" for tower in ("visual", "text") for k in (0, 1)]
    attention = {f"{block}.attn.{part}" for block in blocks for part in parts}
    mlp = {f"{block}.mlp.{part}" for block in blocks for part in ("c_fc", "c_proj")}
    assert layers("attention") == attention
    assert layers("attention", "mlp") == attention | mlp
    assert layers("*.attn.[qv]_proj") == {f"{block}.attn.{part}" for block in blocks for part in ("q_proj", "v_proj")}
    at = "text.transformer.encoder.layer"
    bert = layers("attention", towers="convolutions and BERT")
    assert bert == {
        f"{at}.{k}.attention.{p}" for k in range(6) for p in ("self.query", "self.key", "self.value", "output.dense")
    }
    assert layers("mlp", towers="convolutions and BERT") == {
        f"{at}.{k}.{part}.dense" for k in range(6) for part in ("intermediate", "output")
    }
    # Its pooling multiplies by its layers' weights past them.
    assert not any(name.startswith("visual.") for name in layers("attention", towers="OpenAI's ResNet"))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["atention"], r"adapters.targets: 'atention' matches no linear layer that may train; did you mean 'att"),
        (["attention", "*.conv1"], r"'\*.conv1' matches no .*there are text.transformer.resblocks.\*.attn.k_proj"),
    ],
)
def test_a_target_that_means_nothing_is_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        adapted(targets=targets)


def test_only_adapters_and_the_temperature_train():
    model = backbone()
    training, frozen = adapt(model, AdapterConfig(name="dora", r=4), **PLAIN)
    names = trains(model)
    assert {n for n in names if ".lora_" not in n} == {"logit_scale"}
    # Four layers of 32 x 32 in each of four blocks: A and B of rank 4, and 32 lengths of rows.
    assert training == 16 * (2 * 4 * 32 + 32) + 1
    assert frozen == sum(p.numel() for p in backbone().clip.parameters()) - 1
    assert model.adapters is not None
    assert model.adapters.describe() == (
        "on 8 layers of the image tower and 8 layers of the text tower "
        "(attn.k_proj, attn.out_proj, attn.q_proj, attn.v_proj): 4,608 parameters"
    )


def test_patterns_name_what_trains_beside_and_frozen_layers_get_no_adapter():
    model = backbone()
    beside = ["text.text_projection", "text.transformer.resblocks.1.*"]
    adapt(model, AdapterConfig(name="lora"), beside, FreezeConfig(image="all", text=1))
    last = "text.transformer.resblocks.1"
    own = {f"{last}.{part}" for part in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")}
    own |= {f"{last}.mlp.{part}.{kind}" for part in ("c_fc", "c_proj") for kind in ("weight", "bias")}
    assert {n for n in trains(model) if ".lora_" not in n} == own | {"text.text_projection"}
    assert model.adapters is not None
    assert {name.rpartition(".")[0] for name in model.adapters.layers} == {f"{last}.attn"}
    # What has no adapter keeps its own form.
    assert type(model.clip.get_submodule("visual.transformer.resblocks.0.attn")) is nn.MultiheadAttention


def test_dropout_of_adapters_is_on_in_training_and_frozen_modules_stay_in_eval_mode():
    model = adapted(dropout=0.5).train()
    move(model)
    dropouts = [module for name, module in model.named_modules() if name.endswith("lora_dropout.default")]
    assert len(dropouts) == 16
    assert all(module.training for module in dropouts)
    assert not model.clip.get_submodule("text.ln_final").training
    one, two = (model(*inputs(model)).text_features for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(*(features(model)[1] for _ in range(2)))


@pytest.mark.parametrize("towers", ["plain", "convolutions and BERT"])
def test_gradient_checkpointing_gives_the_same_gradients(towers):
    model = adapted(towers=towers, targets=["attention", "mlp"])
    move(model)
    again = copy.deepcopy(model)
    if towers == "plain":
        checkpoint_gradients(again.clip)
    else:
        again.clip.text.transformer.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[union-attr, operator]
    for one in (model, again):
        torch.manual_seed(0)
        one.train()(*inputs(one)).text_features[:, 0].sum().backward()
    for (name, one), (_, two) in zip(model.clip.named_parameters(), again.clip.named_parameters(), strict=True):
        if name.startswith("text.") and one.requires_grad:
            assert one.grad is not None, name
            torch.testing.assert_close(two.grad, one.grad, msg=name)


def test_a_row_of_zeros_has_no_direction():
    model = backbone()
    with torch.no_grad():
        model.clip.get_parameter("text.transformer.resblocks.0.attn.in_proj_weight")[3] = 0
    with pytest.raises(ValueError, match=r"text.transformer.resblocks.0.attn.q_proj has a row of zeros.*use lora"):
        adapt(model, AdapterConfig(name="dora"), **PLAIN)
