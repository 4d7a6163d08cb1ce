"""`pipeline convert`: any checkpoint to a format of the ecosystem, published only when that format says the same."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from torch import Tensor
from torch.nn import functional as F

from export.command import describe
from export.ecosystem import fits_tokenizer, write_hugging_face, write_longclip, write_open_clip
from pipeline.model import DualEncoder, load_checkpoint
from pipeline.model.formats import locate
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.runs import MODEL_CONFIG, find_checkpoint
from shards.staging import clear_leftovers, staged, sync

Format = Literal["open_clip", "hf", "longclip"]
TOLERANCE = 1e-5  # of any number of an L2-normalised embedding
_MOVED = "where that is the folder itself, change it there when the folder moves"
_CAPTIONS = ("a red apple on a wooden table", "two dogs", "a street at night, seen from above, with wet cobblestones")


def convert_checkpoint(reference: str | None, to: Format, out: Path, runs: Path, say: Callable[[str], None]) -> None:
    """Write a model in another format, load it there, and compare embeddings before it is published.

    Args:
        reference: a checkpoint, a run, a name under `runs`, or weights of any format; None is the newest run.
        to: `open_clip` and `hf` give a folder, `longclip` a file.
        out: it must not exist yet.
        runs: where runs are kept.
        say: called with every line for the reader.

    Raises:
        ValueError: the format cannot express the model, `out` exists, or the embeddings differ; nothing is left behind.
    """
    if out.exists():
        raise ValueError(f"{out} exists; name another --out or remove it")
    path = find_checkpoint(None, runs).path if reference is None else locate(reference, runs)
    model, meta = load_checkpoint(path)
    say(describe(meta))
    if to == "longclip":
        difference = _publish_file(model, out)
    else:
        clear_leftovers(out)
        with staged(out, overwrite=False) as folder:
            if to == "hf":
                write_hugging_face(model, folder)
                difference = _checked(model, _hf_model(folder))
            else:
                write_open_clip(model, folder, folder)  # open_clip wants the tower's configuration where it lies now
                difference = _checked(model, _open_clip_model(folder))
                write_open_clip(model, folder, out)
    say(f"{out}: equal embeddings, largest difference {difference:.1e}; {_how_to_load(to, out)}")
    if to == "open_clip" and model.spec["model_cfg"]["text_cfg"].get("hf_model_name"):
        say(f"open_clip reads the text tower's configuration from text_cfg.hf_model_name of {MODEL_CONFIG}: {_MOVED}")
    if to == "hf" and not fits_tokenizer(model):
        say("no tokenizer is written: the vocabulary is not CLIP's, and the weights do not say which it is")


def _publish_file(model: DualEncoder, out: Path) -> float:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        aside = Path(folder, out.name)
        write_longclip(model, aside)
        again, _ = load_checkpoint(aside)
        difference = _checked(model, again)
        sync(aside)
        aside.rename(out)
    sync(out.parent)
    return difference


def _checked(model: DualEncoder, theirs: Any) -> float:
    """The largest difference of any number of an embedding.

    Raises:
        ValueError: it is beyond the tolerance.
    """
    pixels, ids = _inputs(model)
    with torch.inference_mode():
        own = (model.encode_image(pixels), model.encode_text(ids))
        found = (theirs.encode_image(pixels), theirs.encode_text(ids))
    difference = max(
        float((F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).abs().max()) for a, b in zip(own, found, strict=True)
    )
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the converted model's embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}; nothing is "
            "written. Please report the model's configuration"
        )
    return difference


def _inputs(model: DualEncoder) -> tuple[Tensor, Tensor]:
    """Pixels, and token ids of the whole context."""
    generator = torch.Generator().manual_seed(0)
    size = int(model.spec["preprocess_cfg"]["size"])
    pixels = torch.randn(3, 3, size, size, generator=generator)
    if fits_tokenizer(model):
        ids: Tensor = CaptionTokenizer(model.spec).tokenizer(list(_CAPTIONS))
        return pixels, ids
    text_cfg = model.spec["model_cfg"]["text_cfg"]
    end = text_cfg["eos_id"] if text_cfg.get("pool_type") == "eos" else text_cfg["vocab_size"] - 1
    ids = torch.randint(1, end, (3, model.context_length), generator=generator)
    for row, last in enumerate((5, model.context_length // 2, model.context_length - 1)):
        ids[row, last], ids[row, last + 1 :] = end, 0
    return pixels, ids


class _HuggingFace:
    def __init__(self, model: Any) -> None:
        self.model = model

    def encode_image(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(pixel_values=pixels)
        return features

    def encode_text(self, ids: Tensor) -> Tensor:
        features: Tensor = self.model.get_text_features(input_ids=ids)
        return features


def _hf_model(folder: Path) -> _HuggingFace:
    from transformers import CLIPModel

    return _HuggingFace(CLIPModel.from_pretrained(folder).eval())


def _open_clip_model(folder: Path) -> Any:
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return open_clip.create_model(f"local-dir:{folder}").eval()
    finally:
        logging.disable(previous)


def _how_to_load(to: Format, out: Path) -> str:
    return {
        "open_clip": f'open_clip.create_model("local-dir:{out}")',
        "hf": f'CLIPModel.from_pretrained("{out}")',
        "longclip": f'longclip.load("{out}")',
    }[to]
