"""Weights of others, recognised by what is in them: their outputs are those of an independent forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.config import ModelConfig
from pipeline.model import build_model, load_checkpoint
from pipeline.model.formats import read_weights
from pipeline.runs import MODEL_CONFIG
from tests.fixtures import tiny_clip
from tests.model import official

SHARED = Path(__file__).parents[3] / "shared" / "fixtures"
PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def ids(context: int = 77) -> torch.Tensor:
    """Captions of CLIP's tokenizer; the last two end where the context does."""
    captions = ["a red bus", "two dogs that run on wet sand, seen from above", "so " * (context - 2), "on " * context]
    return open_clip.tokenize(captions, context_length=context)


def check(path, state, activation=official.quick_gelu, tolerance=1e-5):
    """That a file gives the outputs of a state dict; gives back its metadata."""
    model, meta = load_checkpoint(path)
    context = state["positional_embedding"].shape[0]
    assert not model.training
    with torch.no_grad():
        for ours, theirs in (
            (model.encode_image(PIXELS), official.encode_image(state, PIXELS, activation)),
            (model.encode_text(ids(context)), official.encode_text(state, ids(context), activation)),
        ):
            assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()
    assert model.context_length == context
    assert model.logit_scale().item() == pytest.approx(np.exp(3.0), rel=1e-6)
    return meta


# Long-CLIP ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason="the official fixture is not here")
def test_the_official_long_clip_checkpoint_gives_the_official_outputs():
    model, meta = load_checkpoint(SHARED / "longclip_tiny.pt")
    expected = np.load(SHARED / "longclip_tiny_expected.npz")
    with torch.no_grad():
        image = model.encode_image(torch.from_numpy(expected["image"])).numpy()
        text = model.encode_text(torch.from_numpy(expected["text"])).numpy()
    np.testing.assert_allclose(image, expected["image_embedding"], atol=1e-5)
    np.testing.assert_allclose(text, expected["text_embedding"], atol=1e-5)
    assert model.context_length == 248
    assert meta["format"] == "Long-CLIP"


def test_long_clips_two_tables_are_merged(tmp_path):
    state = official.random_state(context=248, longclip=True)
    torch.save(state, tmp_path / "weights")
    assert check(tmp_path / "weights", state)["format"] == "Long-CLIP"


def geometric(state):
    """MLPs as GmP-CLIP stores them: the norm of each row, and the row, which need not have length one."""
    polar = {}
    for name, tensor in state.items():
        if ".mlp.c_" in name and name.endswith(".weight"):
            layer = name.removesuffix("weight")
            polar[f"{layer}r"] = tensor.double().pow(2).sum(1, keepdim=True).sqrt().to(tensor.dtype)
            polar[f"{layer}theta"] = 3 * tensor
        else:
            polar[name] = tensor
    return polar


@pytest.mark.parametrize("longclip", [True, False])
def test_geometric_parametrisation_is_merged_into_plain_weights(longclip, tmp_path):
    state = official.random_state(context=248 if longclip else 77, longclip=longclip)
    polar = geometric(state)
    assert "visual.transformer.resblocks.0.mlp.c_fc.theta" in polar
    save_file({k: v.contiguous() for k, v in polar.items()}, tmp_path / "weights.safetensors")
    if longclip:
        meta = check(tmp_path / "weights.safetensors", state)
        assert meta["format"] == "Long-CLIP in geometric parametrisation"
    else:
        read = read_weights(tmp_path / "weights.safetensors").state
        name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
        torch.testing.assert_close(read[name], state[name].float(), atol=1e-6, rtol=1e-5)


def test_half_of_a_geometric_parametrisation_is_named(tmp_path):
    polar = geometric(official.random_state(context=77))
    del polar["transformer.resblocks.0.mlp.c_proj.r"]
    torch.save(polar, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"resblocks\.0\.mlp\.c_proj is in geometric parametrisation.* None"):
        read_weights(tmp_path / "weights.pt")


# OpenAI and open_clip -------------------------------------------------------------------------------------------------


class Node(nn.Module):
    """A module that only holds tensors, under any dotted names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def nest(state) -> nn.Module:
    root = Node()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module: nn.Module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, Node())
            module = getattr(module, part)
        if tensor.is_floating_point():
            module.register_parameter(last, nn.Parameter(tensor))
        else:
            module.register_buffer(last, tensor)
    return root


def in_half(state):
    return {name: tensor.half().float() for name, tensor in state.items()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_openais_torchscript_archive_in_half_precision(tmp_path):
    state = in_half(official.random_state())
    sizes = {
        "input_resolution": torch.tensor(32),
        "context_length": torch.tensor(77),
        "vocab_size": torch.tensor(49408),
    }
    module = nest({**{name: tensor.half() for name, tensor in state.items()}, **sizes})
    torch.jit.script(module).save(str(tmp_path / "archive"))
    meta = check(tmp_path / "archive", state)
    assert (meta["format"], "note" in meta) == ("OpenAI CLIP", False)


def test_openais_own_state_dict_is_known_by_its_half_precision(tmp_path):
    state = in_half(official.random_state())
    torch.save(state, tmp_path / "w.bin")
    assert "QuickGELU is assumed" in check(tmp_path / "w.bin", state)["note"]


def test_a_training_checkpoint_of_open_clip_with_its_wrappers(tmp_path):
    state = official.random_state()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    more = {"epoch": 3, "name": "ViT", "optimizer": {"state": {}, "param_groups": []}}
    torch.save({**more, "state_dict": wrapped}, tmp_path / "epoch_3.pt")
    meta = check(tmp_path / "epoch_3.pt", state, official.gelu)
    assert (meta["format"], "; GELU is assumed" in meta["note"]) == ("open_clip", True)
    torch.save({"state_dict": wrapped}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check(tmp_path / "old.pt", state, official.gelu)


@pytest.mark.parametrize("quick", [True, False])
def test_a_configuration_beside_the_file_says_the_activation(tmp_path, quick):
    state = official.random_state()
    save_file(state, tmp_path / "any.safetensors")
    spec = read_weights(tmp_path / "any.safetensors").spec
    spec["model_cfg"]["quick_gelu"] = quick
    (tmp_path / MODEL_CONFIG).write_text(json.dumps(spec))
    meta = check(tmp_path / "any.safetensors", state, official.quick_gelu if quick else official.gelu)
    assert "note" not in meta


def test_dimensions_of_a_real_open_clip_model_come_from_its_tensors(tmp_path):
    """ViT-H-14 has image heads 80 wide: they are in no tensor, and found by width and depth."""
    for name in ("ViT-B-32", "ViT-H-14", "RN50"):
        with torch.device("meta"):
            model = open_clip.create_model(name, device="meta", load_weights=False)
        state = {k: torch.empty(v.shape, device="meta") for k, v in model.state_dict().items()}
        from pipeline.model.formats.openai import from_openai, infer_spec

        found = infer_spec(from_openai(state), quick_gelu=False)["model_cfg"]
        stated = open_clip.get_model_config(name)
        for part in ("vision_cfg", "text_cfg"):
            for key, value in stated[part].items():
                if value is not None:
                    assert found[part][key] == value, (name, key)
        assert found["embed_dim"] == stated["embed_dim"]


def test_a_resnet_is_read(tmp_path):
    vision = {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "patch_size": None}
    model = tiny_clip(tmp_path, vision, width=64, heads=1)
    torch.save(model.encoder_state(), tmp_path / "w")
    again, _ = load_checkpoint(tmp_path / "w")
    pixels = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(again.encode_image(pixels), model.encode_image(pixels))


# Hugging Face ---------------------------------------------------------------------------------------------------------


def hf_model(**text):
    from transformers import CLIPConfig, CLIPModel

    text = {"eos_token_id": 49407, "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3, **text}
    vision = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    sizes = {"intermediate_size": 96}
    config = CLIPConfig(text_config={**text, **sizes}, vision_config={**vision, **sizes}, projection_dim=24)
    torch.manual_seed(0)
    return CLIPModel(config).eval()


@pytest.mark.parametrize(
    ("text", "safe", "shard"),
    [
        ({}, True, "5GB"),
        ({"max_position_embeddings": 248}, True, "2MB"),
        ({"vocab_size": 49500}, False, "5GB"),
    ],
)
def test_a_hugging_face_folder_gives_what_transformers_gives(tmp_path, text, safe, shard):
    theirs = hf_model(**text)
    theirs.save_pretrained(tmp_path, safe_serialization=safe, max_shard_size=shard)
    ours, meta = load_checkpoint(tmp_path)
    tokens = ids(text.get("max_position_embeddings", 77))
    if "vocab_size" in text:
        tokens[:, 2] = 49450  # an added token beyond the end token: the largest id is not the end
    with torch.no_grad():
        torch.testing.assert_close(
            ours.encode_image(PIXELS), theirs.get_image_features(pixel_values=PIXELS), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            ours.encode_text(tokens), theirs.get_text_features(input_ids=tokens), atol=1e-5, rtol=0
        )
    assert meta["format"] == "Hugging Face CLIP"
    assert "note" not in meta


def test_without_its_config_a_hugging_face_file_has_heads_64_wide_and_quick_gelu(tmp_path):
    theirs = hf_model(hidden_size=64, num_attention_heads=1)
    for layer in theirs.vision_model.encoder.layers:
        layer.self_attn.num_heads, layer.self_attn.head_dim, layer.self_attn.scale = 1, 64, 64**-0.5
    save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp_path / "alone.safetensors")
    ours, meta = load_checkpoint(tmp_path / "alone.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(ours.encode_image(PIXELS), theirs.get_image_features(PIXELS), atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.encode_text(ids()), theirs.get_text_features(ids()), atol=1e-5, rtol=0)
    assert "QuickGELU is assumed" in meta["note"]


# into a recipe's model ------------------------------------------------------------------------------------------------


def test_weights_name_a_model_or_fill_one(tmp_path):
    state = official.random_state(context=248, longclip=True)
    torch.save(state, tmp_path / "longclip.pt")
    expected = official.encode_text(state, ids(248))
    named = build_model(ModelConfig(name=str(tmp_path / "longclip.pt"))).eval()
    config = json.loads(json.dumps(named.spec))
    config["model_cfg"]["text_cfg"]["context_length"] = 77
    (tmp_path / "small.json").write_text(json.dumps(config))
    filled = build_model(ModelConfig(name=str(tmp_path / "small.json")), read_weights(tmp_path / "longclip.pt")).eval()
    for model in (named, filled):
        with torch.no_grad():
            torch.testing.assert_close(model.encode_text(ids(248)).double(), expected, atol=1e-4, rtol=1e-5)


def test_another_activation_is_refused_not_mixed_up(tmp_path):
    state = official.random_state(context=248, longclip=True)
    torch.save(state, tmp_path / "longclip.pt")
    weights = read_weights(tmp_path / "longclip.pt")
    spec = json.loads(json.dumps(weights.spec))
    del spec["model_cfg"]["quick_gelu"]
    (tmp_path / "gelu.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"was trained with QuickGELU, and this model has GELU"):
        build_model(ModelConfig(name=str(tmp_path / "gelu.json")), weights)


def test_pictures_of_another_size_get_their_positions_resized(tmp_path):
    torch.save(official.random_state(), tmp_path / "w.pt")
    model = build_model(ModelConfig(name=str(tmp_path / "w.pt"), image_size=64))
    assert model.clip.visual.positional_embedding.shape == (17, 64)
    grid = read_weights(tmp_path / "w.pt").state["visual.positional_embedding"]
    assert torch.equal(model.clip.visual.positional_embedding[0], grid[0])
    assert model(pixel_values=torch.zeros(1, 3, 64, 64)).image_features.shape == (1, 16)
