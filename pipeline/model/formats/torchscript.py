"""The tensors of a TorchScript archive, such as OpenAI's CLIP files, without running the code that it carries.

The archive's data.pkl is a pickle of nested modules. It is read by an unpickler to which every class of the archive is
an empty box, and which knows besides only how a tensor is put together; any other name is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def is_torchscript(names: Sequence[str]) -> bool:
    """Whether a zip with these members is a TorchScript archive."""
    return any(name.endswith("constants.pkl") for name in names) and any("/code/" in name for name in names)


def read_torchscript(archive: zipfile.ZipFile, path: Path) -> dict[str, Tensor]:
    """Every tensor of the archived module by its dotted name.

    Raises:
        ValueError: the archive is damaged, or its pickle asks for anything but modules and tensors.
    """
    pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
    if pickled is None:
        raise ValueError(f"{path} is a TorchScript archive without its data.pkl: cut short or damaged")
    try:
        with archive.open(pickled) as file:
            module = _Unpickler(file, archive, pickled.removesuffix("data.pkl")).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: a TorchScript archive that is not read, because {error}") from error
    except (EOFError, KeyError, RuntimeError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is a TorchScript archive that was cut short or damaged ({error})") from error
    return dict(_tensors(module, ""))


class _Box:
    """Stands for any class of the archive; pickle fills its `__dict__`."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self._archive = archive
        self._root = root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Box
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to something outside of it: {kind}")
        if key not in self._storages:
            data = self._archive.read(f"{self._root}data/{key}")
            self._storages[key] = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0).to(dtype)
        return self._storages[key]


def _rebuild(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> Tensor:
    return storage.as_strided(tuple(size), tuple(stride), offset)  # refuses to look outside its storage


def _values(items: Any, *_: Any) -> Any:
    return items


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        ("torch.jit._pickle", name): _values
        for name in (
            "build_intlist",
            "build_doublelist",
            "build_boollist",
            "build_tensorlist",
            "restore_type_tag",
        )
    },
}


def _tensors(value: Any, prefix: str) -> list[tuple[str, Tensor]]:
    if not isinstance(value, _Box):
        return []
    found: list[tuple[str, Tensor]] = []
    for name, item in vars(value).items():
        found += [(prefix + name, item)] if isinstance(item, Tensor) else _tensors(item, f"{prefix}{name}.")
    return found
