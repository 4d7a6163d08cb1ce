"""What is not the weights of a CLIP is named for what it is, and nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.model import load_checkpoint
from tests.model.official import random_state


class Canary:
    """A pickle that would leave a file behind if anybody ran it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


STATE = random_state(vocab=300)
TRAINING = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><title>Sign in</title>", "HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
        (b"\x1f\x8b\x08\x00", "gzip archive"),
        (b"some text", "no file of weights"),
        (TRAINING, "state of an optimizer"),
        ({"optimizer": TRAINING, "epoch": 3}, "state of an optimizer"),
        ({"epoch": 3, "loss": 0.5}, "a dict of epoch, loss, no state dict"),
        ([torch.zeros(2)], "holds a list, no state dict"),
        ({"base_model.model.visual.lora_A.weight": torch.zeros(2, 2)}, "LoRA adapter"),
        (
            {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)},
            r"2 tensors \(fc\.weight, .* not those of a CLIP",
        ),
        ({"text_model.final_layer_norm.weight": torch.zeros(2)}, "only the text half of a Hugging Face CLIP"),
        (
            {"visual.trunk.stem.weight": torch.zeros(1), "text.proj.weight": torch.zeros(1)},
            "only a configuration tells",
        ),
        ({k: v for k, v in STATE.items() if k != "text_projection"}, "has no tensor 'text.text_projection'"),
        ({k: v for k, v in STATE.items() if k != "ln_final.bias"}, r"1 tensors are missing.*text\.ln_final\.bias"),
        ({**STATE, "positional_embedding_res": torch.zeros(3, 64)}, "two position tables of one shape"),
    ],
)
def test_a_foreign_file_says_what_it_is(tmp_path, content, what):
    path = write(tmp_path / "some-clip.pt", content)
    with pytest.raises(ValueError, match=what) as raised:
        load_checkpoint(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.999])
def test_a_truncated_file_says_so(tmp_path, kind, share):
    path = tmp_path / "weights"
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"cut short"):
        load_checkpoint(path)


def test_a_plain_zip_is_not_weights(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match=r"a zip archive \(of readme\.txt\), not of torch"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_whole_module_or_a_trap_is_refused_and_not_run(tmp_path):
    canary = Canary(str(tmp_path / "ran"))
    module = write(tmp_path / "module.pt", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Python object \(torch\.nn\.modules\.linear\.Linear\)"):
        load_checkpoint(module)
    for path in (
        write(tmp_path / "zip.pt", {"state_dict": STATE, "more": canary}),
        write(tmp_path / "bare.pt", pickle.dumps(canary, protocol=2)),
    ):
        with pytest.raises(ValueError, match=r"Python object \(\w+\.mkdir\), which only running its code could read"):
            load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_a_trap_in_a_torchscript_archive_is_refused_and_not_run(tmp_path):
    with zipfile.ZipFile(tmp_path / "trap.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(Canary(str(tmp_path / "ran")), protocol=2))
        archive.writestr("a/constants.pkl", b"")
        archive.writestr("a/code/__torch__.py", "raise SystemExit")
    with pytest.raises(ValueError, match=r"TorchScript archive that is not read, because it asks for \w+\.mkdir"):
        load_checkpoint(tmp_path / "trap.pt")
    assert not (tmp_path / "ran").exists()


def test_an_index_that_names_other_folders_or_missing_parts_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for name, what in (("../secret", "outside its own folder"), ("part-1", "which is not beside it")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match=what):
            load_checkpoint(index)


def test_nothing_there_says_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"neither a checkpoint, nor a run"):
        load_checkpoint(tmp_path / "no-such-file.pt", tmp_path)
