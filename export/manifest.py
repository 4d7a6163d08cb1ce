"""What lies in a bundle, and whether it is whole. No torch: the runtime checks with this.

<bundle>/
    config.json                dimensions, in Hugging Face's keys
    preprocessor_config.json   the image transform, in Hugging Face's keys
    tokenizer.json             captions to ids, in the format of the `tokenizers` library
    tokenizer_config.json      padding, context length, how captions are cleaned first
    onnx/vision_model.onnx     pixel_values [B, 3, H, W] float32 -> image_embeds [B, D], L2-normalised
    onnx/text_model.onnx       input_ids [B, L] int64            -> text_embeds  [B, D], L2-normalised
    manifest.json              hashes of all the above, the model, its origin, versions, the parity report
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.runs import read_json, sha256_of

MANIFEST = "manifest.json"
FORMAT = "hn-clip-bundle"
FORMAT_VERSION = 1

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VISION_GRAPH = "onnx/vision_model.onnx"
TEXT_GRAPH = "onnx/text_model.onnx"
REQUIRED = (CONFIG, PREPROCESSOR, TOKENIZER, TOKENIZER_CONFIG, VISION_GRAPH, TEXT_GRAPH)

_EXPORT = "export it again: pipeline export --onnx"


def load_manifest(path: str | Path) -> dict[str, Any]:
    """A bundle's manifest, its files not yet looked at.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is no bundle, or one of a format that this version does not read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no bundle at {folder}: no such folder; make one: pipeline export --onnx")
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is not a bundle: it has no {MANIFEST}; make one: pipeline export --onnx")
    manifest: dict[str, Any] = read_json(folder / MANIFEST)
    if not is_bundle(folder):
        raise ValueError(f"{folder} is not a bundle: its {MANIFEST} is that of something else")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} is a bundle of format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}; "
            f"{_EXPORT}"
        )
    missing = [name for name in REQUIRED if name not in manifest["files"]]
    if missing:
        raise ValueError(f"bundle {folder} is damaged: its {MANIFEST} does not list {missing[0]}; {_EXPORT}")
    return manifest


def is_bundle(path: Path) -> bool:
    """Whether a folder calls itself a bundle, of whichever format version and in whatever state."""
    if not (path / MANIFEST).is_file():
        return False
    try:
        manifest: Any = read_json(path / MANIFEST)
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def check_bundle(path: str | Path) -> dict[str, Any]:
    """Compare every file of a bundle with its manifest, and return the manifest.

    Raises:
        FileNotFoundError, ValueError: as `load_manifest`; or a file is missing or has changed, which is named.
    """
    manifest = load_manifest(path)
    for name, entry in manifest["files"].items():
        file = Path(path) / name
        if not file.is_file():
            raise ValueError(f"bundle {path} is damaged: {name} is missing; copy the whole folder, or {_EXPORT}")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"bundle {path} is damaged: {name} has {size} bytes, not {entry['bytes']}; {_EXPORT}")
        if sha256_of(file) != entry["sha256"]:
            raise ValueError(f"bundle {path} is damaged: {name} has changed since it was exported; {_EXPORT}")
    return manifest


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The `files` entry of a manifest: size in bytes and sha256 of every file below a folder, but the manifest."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }
