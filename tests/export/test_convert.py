"""Weights for others, loaded by the others themselves: open_clip, transformers, and Long-CLIP as it is defined."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
from torch.nn import functional as F

from export.convert import convert_checkpoint
from pipeline.cli import main
from pipeline.config import ModelConfig
from pipeline.model import build_model, load_checkpoint
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from pipeline.runs import MODEL_CONFIG
from tests.fixtures import minilm_text_cfg, write_tiny_clip
from tests.model import official

CAPTIONS = ["A red bus.", "two dogs that run on wet sand, seen from above", "so many words " * 120]
PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def longclip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("long") / "longclip.pt"
    torch.save(official.random_state(context=248, longclip=True), path)
    return path


def converted(source: Path | str, to, out: Path) -> list[str]:
    said: list[str] = []
    convert_checkpoint(str(source), to, out, out.parent / "runs", said.append)
    return said


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(F.normalize(ours, dim=-1), F.normalize(theirs, dim=-1), atol=1e-5, rtol=0)


# open_clip ------------------------------------------------------------------------------------------------------------


def test_open_clip_loads_its_folder_and_gives_equal_embeddings(longclip, tmp_path):
    converted(longclip, "open_clip", tmp_path / "out")
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    ours, _ = load_checkpoint(longclip)
    with torch.no_grad():
        equal(ours.encode_image(PIXELS), theirs.encode_image(PIXELS))
        equal(ours.encode_text(CaptionTokenizer(ours.spec)(CAPTIONS)), theirs.encode_text(tokenizer(CAPTIONS)))
    assert theirs.logit_scale.exp().item() == pytest.approx(ours.logit_scale().item(), rel=1e-6)
    assert tokenizer.context_length == 248


def test_a_hugging_face_tower_out_of_a_package_goes_along(tmp_path):
    name = write_tiny_clip(tmp_path / "bert.json", **minilm_text_cfg())
    ours = build_model(ModelConfig(name=name, context_length=12)).eval()
    save(ours, tmp_path / "run")
    converted(tmp_path / "run", "open_clip", tmp_path / "out")
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    ids = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(CAPTIONS)
    assert ids.shape == (3, 12)
    with torch.no_grad():
        equal(ours.encode_text(CaptionTokenizer(ours.spec)(CAPTIONS)), theirs.encode_text(ids))
    (tmp_path / "out").rename(tmp_path / "moved")
    moved, _ = load_checkpoint(tmp_path / "moved")  # finds the tower's configuration and tokenizer where they are now
    with torch.no_grad():
        equal(ours.encode_text(ids), moved.encode_text(CaptionTokenizer(moved.spec)(CAPTIONS)))
    with pytest.raises(ValueError, match=r"CLIPModel cannot express this model: its text tower is another Hugging"):
        converted(tmp_path / "run", "hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_no_path_of_this_machine_is_stored_where_a_relative_one_was_given(tmp_path, monkeypatch):
    name = write_tiny_clip(tmp_path / "bert.json", **minilm_text_cfg())
    save(build_model(ModelConfig(name=name, context_length=12)).eval(), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    converted(Path("run"), "open_clip", Path("out"))
    assert str(tmp_path) not in (tmp_path / "out" / MODEL_CONFIG).read_text()
    open_clip.create_model("local-dir:out")


def save(model, folder: Path) -> None:
    """A folder in open_clip's layout, as others publish it."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / MODEL_CONFIG).write_text(json.dumps(model.spec))
    save_file({k: v.contiguous() for k, v in model.encoder_state().items()}, folder / "open_clip_model.safetensors")


# Hugging Face ---------------------------------------------------------------------------------------------------------


def test_transformers_loads_a_248_token_clip_with_its_processors(longclip, tmp_path):
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizerFast

    out = tmp_path / "out"
    said = converted(longclip, "hf", out)
    theirs = CLIPModel.from_pretrained(out).eval()
    assert theirs.config.text_config.max_position_embeddings == 248
    tokenizer = CLIPTokenizerFast.from_pretrained(out)
    ids = tokenizer(CAPTIONS, padding=True, truncation=True, return_tensors="pt")
    ours, _ = load_checkpoint(longclip)
    own_ids = CaptionTokenizer(ours.spec)(CAPTIONS)
    assert ids["input_ids"].shape == own_ids.shape == (3, 248)
    kept = ids["attention_mask"].bool()
    assert torch.equal(ids["input_ids"][kept], own_ids[kept])
    with torch.no_grad():
        equal(ours.encode_image(PIXELS), theirs.get_image_features(PIXELS))
        equal(ours.encode_text(own_ids), theirs.get_text_features(**ids))
        both = theirs(pixel_values=PIXELS, **ids)
        features = ours(PIXELS, own_ids)
        logits = features.logit_scale * features.image_features @ features.text_features.T
        torch.testing.assert_close(both.logits_per_image, logits, atol=1e-3, rtol=0)
    picture = Image.radial_gradient("L").resize((70, 50)).convert("RGB")
    pixels = CLIPImageProcessor.from_pretrained(out)(picture, return_tensors="pt")["pixel_values"][0]
    own = torch.from_numpy(Preprocess.from_config(ours.spec["preprocess_cfg"])(picture))
    torch.testing.assert_close(pixels, own, atol=1e-5, rtol=0)
    assert "equal embeddings, largest difference" in said[-1]


@pytest.mark.parametrize(
    ("vision", "text", "why"),
    [
        ({"timm_model_name": "resnet18", "timm_proj": "linear", "image_size": 64}, {}, "image tower is a ResNet"),
        (None, {"no_causal_mask": True}, "does not read from left to right"),
        (None, {"proj_bias": True}, "projection is no plain matrix"),
        (None, {"ls_init_value": 0.1}, "layers have more than CLIP's"),
    ],
)
def test_what_clipmodel_cannot_express_is_said(tmp_path, vision, text, why):
    save(build_model(ModelConfig(name=write_tiny_clip(tmp_path / "tiny.json", vision, **text))), tmp_path / "run")
    with pytest.raises(ValueError, match=why):
        converted(tmp_path / "run", "hf", tmp_path / "out")
    assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())


def test_a_table_longer_than_the_context_is_cut(tmp_path):
    from transformers import CLIPModel

    model = build_model(ModelConfig(name=write_tiny_clip(tmp_path / "tiny.json"), context_length=9)).eval()
    save(model, tmp_path / "run")
    assert load_checkpoint(tmp_path / "run")[0].context_length == 9
    converted(tmp_path / "run", "hf", tmp_path / "hf")
    theirs = CLIPModel.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.text_config.max_position_embeddings == 9
    ids = CaptionTokenizer(model.spec)(CAPTIONS)
    with torch.no_grad():
        equal(model.encode_text(ids), theirs.get_text_features(ids))


# Long-CLIP ------------------------------------------------------------------------------------------------------------


def test_the_long_clip_file_is_the_official_layout(longclip, tmp_path):
    """From its definition: the first 20 positions of one table, the others of the other, QuickGELU, heads 64 wide."""
    converted(longclip, "hf", tmp_path / "hf")  # by way of another format
    converted(tmp_path / "hf", "longclip", tmp_path / "back.pt")
    original = official.random_state(context=248, longclip=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {k: v.shape for k, v in back.items()} == {k: v.shape for k, v in original.items()}
    ids = CaptionTokenizer(load_checkpoint(longclip)[0].spec)(CAPTIONS)
    torch.testing.assert_close(official.encode_text(back, ids), official.encode_text(original, ids))
    torch.testing.assert_close(official.encode_image(back, PIXELS), official.encode_image(original, PIXELS))
    assert [p.name for p in tmp_path.iterdir() if "back" in p.name] == ["back.pt"]


def test_what_long_clips_code_cannot_build_is_said(tmp_path):
    torch.save(official.random_state(), tmp_path / "gelu.pt")
    with pytest.raises(ValueError, match="trained with GELU"):
        converted(tmp_path / "gelu.pt", "longclip", tmp_path / "out.pt")
    half = {k: v.half() for k, v in official.random_state().items()}
    torch.save(half, tmp_path / "short.pt")
    with pytest.raises(ValueError, match=r"context is 77 tokens.*model\.context_length=248"):
        converted(tmp_path / "short.pt", "longclip", tmp_path / "out.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gelu.pt", "short.pt"]


# the command ----------------------------------------------------------------------------------------------------------


def test_the_command(longclip, tmp_path, monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["pipeline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    out = tmp_path / "out"
    code, said = run("convert", str(longclip), "--to", "open_clip", "--out", str(out))
    assert code == 0
    assert "Long-CLIP" in said
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    code, said = run("convert", str(longclip), "--to", "hf", "--out", str(out))
    assert (code, said.count("\n")) == (2, 1)
    assert "exists; name another --out" in said
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    code, said = run("convert", str(longclip), "--to", "hf")
    assert (code, "say which format and where" in said) == (2, True)
