"""Tensors out of a file, safely: nothing in it is ever run. What is not a file of weights is named for what it is."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.model.formats.torchscript import is_torchscript, read_torchscript
from pipeline.runs import read_json

EXPECTED = "expected the weights of a CLIP: a torch state dict, a TorchScript archive or safetensors"

# What people pass by mistake, by how it begins.
_FOREIGN = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (git lfs pull)"),
    (b"<", "an HTML or XML page (a download that asked for a login?)"),
    (b"{", "JSON text"),
    (b"[", "JSON text"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x89HDF", "an HDF5 file (Keras)"),
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x08", "an ONNX graph or another protobuf"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8", "a JPEG picture"),
)
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params")
_PREFIXES = ("module.", "_orig_mod.", "model.", "clip_model.", "clip.", "base_model.model.")


def read_state(path: Path) -> tuple[dict[str, Tensor], bool]:
    """The state dict of a file, out of whatever wraps it, and whether the file is a TorchScript archive.

    Args:
        path: safetensors, or a torch file (zip, legacy pickle or TorchScript), or a Hugging Face index of several.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, one that was cut short, or one that holds no state dict; says which.
    """
    with path.open("rb") as file:
        head = file.read(512)
    size = path.stat().st_size
    if not head:
        raise ValueError(f"{path} is empty; {EXPECTED}")
    if path.name.endswith(".index.json"):
        return _read_parts(path), False
    if len(head) > 8 and head[8:9] == b"{":
        return _unwrap(_read_safetensors(path, struct.unpack("<Q", head[:8])[0], size), path), False
    if head.startswith(b"PK"):
        return _read_zip(path)
    if head.startswith(b"\x80"):
        return _unwrap(_torch_load(path), path), False
    what = next((name for magic, name in _FOREIGN if head.lstrip().startswith(magic)), "no file of weights")
    raise ValueError(f"{path} is {what}; {EXPECTED}")


def _read_parts(path: Path) -> dict[str, Tensor]:
    """A state dict that an index spreads over several files beside it."""
    index = read_json(path)
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{path} is no index of weight files: it has no 'weight_map'")
    state: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        if Path(name).name != name:
            raise ValueError(f"{path} names a file outside its own folder: {name}")
        if not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is not beside it: download all parts")
        state.update(read_state(path.parent / name)[0])
    if missing := sorted(set(index["weight_map"]) - set(state)):
        raise ValueError(f"{path} promises {missing[0]}, which none of its files holds")
    return state


def _read_safetensors(path: Path, header: int, size: int) -> dict[str, Tensor]:
    if header + 8 > size:
        raise ValueError(f"{path} is a safetensors file that was cut short ({size} bytes): download it again")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is a safetensors file that was cut short or damaged ({error})") from error
    return tensors


def _read_zip(path: Path) -> tuple[dict[str, Tensor], bool]:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is a torch file (a zip) that was cut short: its end is missing; download it again")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if is_torchscript(names):
            return _unwrap(read_torchscript(archive, path), path), True
    if not any(name.endswith("data.pkl") for name in names):
        raise ValueError(f"{path} is a zip archive (of {', '.join(names[:3])}), not of torch; {EXPECTED}")
    return _unwrap(_torch_load(path), path), False


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global) `?([\w.]+)", str(error))
        if found is None:
            raise ValueError(f"{path} is a pickle that holds no tensors or is damaged; {EXPECTED}") from error
        raise ValueError(
            f"{path} holds a Python object ({found.group(1)}), which only running its code could read, and that is "
            "refused: save the model's state_dict() and pass that file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is a torch file that was cut short or damaged ({reason})") from error


def _unwrap(value: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside training checkpoints, without the prefixes that wrappers of a module leave."""
    while isinstance(value, dict) and (inner := next((value[k] for k in _WRAPPERS if _is_state(value.get(k))), None)):
        value = inner
    if isinstance(value, dict) and not _is_state(value) and _is_optimizer(value):
        raise ValueError(f"{path} is the state of an optimizer, without the model's weights; {EXPECTED}")
    if not _is_state(value):
        what = f"a {type(value).__name__}"
        if isinstance(value, dict):
            what = f"a dict of {', '.join(map(str, list(value)[:5])) or 'nothing'}"
        raise ValueError(f"{path} holds {what}, no state dict; {EXPECTED}")
    state = {key: tensor for key, tensor in value.items() if isinstance(tensor, Tensor)}
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    return state


def _is_state(value: Any) -> bool:
    """A dict of names to tensors; training checkpoints keep the like one level deeper."""
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        return False
    return sum(isinstance(item, Tensor) for item in value.values()) * 2 > len(value) or any(
        _is_state(value.get(key)) for key in _WRAPPERS
    )


def _is_optimizer(value: dict[Any, Any]) -> bool:
    return {"state", "param_groups"} <= set(value) or any("optimizer" in str(key) for key in value)
