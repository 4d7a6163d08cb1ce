"""What tests of several frameworks share: a tiny model whose features differ, and shards with regions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.model import DualEncoder
from pipeline.model.factory import build_from_spec
from shards.writer import write_set
from tests.train.tiny import MODEL

Row = tuple[str, list[dict[str, Any]]]


def distinct_model() -> DualEncoder:
    """Its weights are always the same, and large enough that features differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_from_spec(MODEL)
        torch.nn.init.normal_(model.clip.text.token_embedding.weight)  # type: ignore[union-attr,arg-type]
        torch.nn.init.normal_(model.clip.text.positional_embedding)  # type: ignore[union-attr,arg-type]
    return model


def write_regions_set(source: str, folder: Path, tiny_set: Path, describe: Callable[[int, str], Row]) -> Path:
    """Shards of a training list over 32 pictures of the tiny set.

    Args:
        source: `goal-json` or `structxlip-json`.
        folder: where the list and the shards go.
        describe: a pair's caption and segments, by its number and the tiny set's caption.
    """
    rows = []
    for number, line in enumerate((tiny_set.parent / "captions.jsonl").read_text().splitlines()[:32]):
        row = json.loads(line)
        caption, segments = describe(number, row["captions"][0])
        rows.append({"original_filename": row["image"], "original_caption": caption, "segment": segments})
    listed = folder / "train.json"
    listed.write_text(json.dumps(rows))
    write_set(source, source=str(listed), images=str(tiny_set.parent / "pictures"), out=str(folder / "set"))
    return folder / "set"
