"""Which model a file or folder holds, by what is in it and never by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pipeline.model.formats.files import EXPECTED, read_state
from pipeline.model.formats.geometric import is_geometric, merge_geometric
from pipeline.model.formats.hugging_face import from_hugging_face, is_hugging_face, spec_of
from pipeline.model.formats.openai import (
    LONGCLIP_TABLE,
    from_openai,
    infer_spec,
    is_openai,
    is_plain,
    looks_like_openai_weights,
)
from pipeline.preprocess import Preprocess
from pipeline.runs import MANIFEST, MODEL_CONFIG, WEIGHTS, Checkpoint, find_checkpoint, read_json

_HF_CONFIG = "config.json"
_HF_PREPROCESSOR = "preprocessor_config.json"
_WEIGHT_FILES = (  # in a folder, the first that is there
    WEIGHTS,
    "open_clip_pytorch_model.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Weights:
    """Weights with the architecture that they belong to.

    Attributes:
        path: the file, or the checkpoint's folder.
        kind: the format, in words.
        spec: the open_clip configuration.
        state: float32 tensors under the names of `DualEncoder.encoder_state`.
        activation_known: whether the format or a configuration says if the activation is QuickGELU; tensors do not.
        manifest: what a run's checkpoint says of itself.
    """

    path: Path
    kind: str
    spec: dict[str, Any]
    state: dict[str, Tensor]
    activation_known: bool = True
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def context_length(self) -> int:
        """Tokens of the text tower's position table."""
        return int(self.spec["model_cfg"]["text_cfg"].get("context_length", 77))

    def note(self) -> str | None:
        """What was assumed, for a reader."""
        if self.activation_known:
            return None
        name = "QuickGELU" if self.spec["model_cfg"].get("quick_gelu") else "GELU"
        return (
            f"{self.path} does not say its activation; {name} is assumed. If that is wrong, name the model "
            f"(model.name, model.pretrained) or put its {MODEL_CONFIG} beside the file"
        )

    def meta(self) -> dict[str, Any]:
        """The manifest of a run's checkpoint, or what is known of other weights; always `path`, `format`."""
        found = {**self.manifest, "path": str(self.path), "format": self.kind}
        return {**found, "note": note} if (note := self.note()) else found


def read_weights(reference: str | Path, root: str | Path = "runs") -> Weights:
    """Weights of any CLIP.

    Args:
        reference: a file or folder of open_clip, OpenAI, Long-CLIP or Hugging Face; else a run or checkpoint, see
            `find_checkpoint`.
        root: where runs are kept.

    Raises:
        FileNotFoundError, ValueError: nothing there, or not the weights of a CLIP; says what it is instead.
    """
    path = locate(reference, root)
    return _of_file(path) if path.is_file() else _of_checkpoint(path)


def locate(reference: str | Path, root: str | Path = "runs") -> Path:
    """The weights file, or the folder of the run's checkpoint, that `read_weights` would read."""
    path = Path(reference)
    if path.is_file():
        return path
    if path.is_dir() and not (path / MANIFEST).is_file() and (file := _weights_in(path)) is not None:
        return file
    return find_checkpoint(str(reference), Path(root)).path


def _of_checkpoint(folder: Path) -> Weights:
    """The weights of a run's checkpoint, checked against its manifest."""
    Checkpoint(folder).check()
    state = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    spec = read_json(folder / MODEL_CONFIG)
    return Weights(folder, "checkpoint of a run", spec, state, manifest=read_json(folder / MANIFEST))


def _weights_in(folder: Path) -> Path | None:
    """The weights file of somebody's model folder."""
    named = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if named is not None:
        return named
    if (folder / MODEL_CONFIG).is_file() or (folder / _HF_CONFIG).is_file():
        raise ValueError(f"{folder} has a configuration but none of {', '.join(_WEIGHT_FILES)}")
    return None


def _of_file(path: Path) -> Weights:
    state, archive = read_state(path)
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    try:
        return _recognise(path, state, archive)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _recognise(path: Path, state: dict[str, Tensor], archive: bool) -> Weights:
    if any("lora_" in key for key in state):
        raise ValueError("it is a LoRA adapter, which changes a model and is none: merge it into its base first")
    geometric = is_geometric(state)
    if geometric:
        state = merge_geometric(state)
    if is_hugging_face(state):
        return _hugging_face(path, from_hugging_face(state))
    longclip = LONGCLIP_TABLE in state
    stated = archive or longclip or "input_resolution" in state
    kind = "Long-CLIP" if longclip else "OpenAI CLIP" if stated else "open_clip"
    kind += " in geometric parametrisation" if geometric else ""
    if is_openai(state):
        state = from_openai(state)
    elif not any(k.startswith("visual.") for k in state) or not any(k.startswith("text.") for k in state):
        first = ", ".join(list(state)[:3])
        raise ValueError(f"its {len(state)} tensors ({first}, ...) are not those of a CLIP; {EXPECTED}")
    config = path.parent / MODEL_CONFIG
    if not longclip and config.is_file():
        return Weights(path, kind, _stated_spec(config, state), state)
    if not is_plain(state):
        raise ValueError(
            f"its towers are not open_clip's own, so that only a configuration tells what they are: put {MODEL_CONFIG} "
            "beside the file, or name the model (model.name) and give the file as model.pretrained"
        )
    spec = infer_spec(state, quick_gelu=stated or looks_like_openai_weights(state))
    return Weights(path, kind, spec, state, activation_known=stated)


def _hugging_face(path: Path, state: dict[str, Tensor]) -> Weights:
    config = path.parent / _HF_CONFIG
    spec, stated = spec_of(state, read_json(config) if config.is_file() else None)
    preprocessor = path.parent / _HF_PREPROCESSOR
    if preprocessor.is_file():
        spec["preprocess_cfg"] = Preprocess.from_hugging_face(read_json(preprocessor)).to_config()
    text = spec["model_cfg"]["text_cfg"]
    if text["vocab_size"] != 49408 and (path.parent / "tokenizer_config.json").is_file():
        text["hf_tokenizer_name"] = str(path.parent.resolve())  # not CLIP's own vocabulary
    return Weights(path, "Hugging Face CLIP", spec, state, activation_known=stated)


def _stated_spec(config: Path, state: dict[str, Tensor]) -> dict[str, Any]:
    """The configuration beside a file, with the context that its position table has."""
    spec = read_json(config)
    if not isinstance(spec, dict) or not isinstance(spec.get("model_cfg"), dict):
        raise ValueError(f"{config} has no 'model_cfg'; expected an open_clip configuration")
    spec.setdefault("preprocess_cfg", {})
    _find_beside(config, spec["model_cfg"].get("text_cfg", {}))
    if "text.positional_embedding" in state and not spec["model_cfg"]["text_cfg"].get("embed_cls"):
        spec["model_cfg"]["text_cfg"]["context_length"] = state["text.positional_embedding"].shape[0]
    return spec


def _find_beside(config: Path, text_cfg: dict[str, Any]) -> None:
    """A text tower's configuration and tokenizer that lie in the model's folder are found there, wherever that is."""
    beside = {"hf_model_name": _HF_CONFIG, "hf_tokenizer_name": "tokenizer_config.json"}
    for key, file in beside.items():
        if text_cfg.get(key) and (config.parent / file).is_file():
            text_cfg[key] = str(config.parent.resolve())
