"""A set of shards as WebDataset tars, for training elsewhere. The pictures keep their bytes.

    <out>/train-000000.tar    <key>.jpg (or .png, .webp, ...), <key>.txt: the first caption,
                              <key>.json: {"id", "captions", "meta"}

A key ends at its first dot, and a slash would be a folder: in keys these, "%" and what is invisible are written as %XX.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shards.images import sniff_format
from shards.reader import ShardReader
from shards.receipt import MANIFEST, read_receipt
from shards.report import Progress
from shards.staging import clear_leftovers, staged

_EXTENSIONS = {"jpeg": "jpg"}


def to_webdataset(
    set_dir: Path, out: Path, tar_size: float = 1000, progress: Callable[[Progress], None] | None = None
) -> dict[str, int]:
    """Write every split of a set as tars.

    Args:
        set_dir: The set's folder.
        out: A folder that is not there yet, or empty.
        tar_size: MB at which a tar is full.
        progress: Called after each pair.

    Returns:
        By split, the pairs written.

    Raises:
        ValueError: `set_dir` is no set or damaged, or `out` holds something.
    """
    from webdataset import ShardWriter  # torch comes along

    receipt = read_receipt(set_dir)
    if receipt is None:
        raise ValueError(f"{set_dir} holds no {MANIFEST}: it is no shard set, or one that was not written by shards")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not empty: choose another folder")
    wanted = sum(entry["written"] for entry in receipt.splits.values())
    done, size = 0, 0
    clear_leftovers(out.resolve())
    with staged(out.resolve(), overwrite=False) as folder:
        for split in receipt.splits:
            pattern = f"{str(folder).replace('%', '%%')}/{split.replace('%', '%%')}-%06d.tar"
            # mtime 0: equal sets give equal tars
            with ShardWriter(pattern, maxcount=1 << 60, maxsize=tar_size * 1e6, verbose=0, mtime=0) as tars:
                reader = ShardReader(set_dir / split)
                for index in range(len(reader)):
                    pair = reader[index]
                    tars.write(_sample(pair))
                    done, size = done + 1, size + len(pair["image"])
                    if progress is not None:
                        progress(Progress(done, wanted, size))
    return {split: entry["written"] for split, entry in receipt.splits.items()}


def key_of(id: str) -> str:
    """The key that stands for an id in a tar."""
    return "".join(_escaped(char) if char in "./%\\" or not char.isprintable() else char for char in id)


def _escaped(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def _sample(pair: dict[str, Any]) -> dict[str, Any]:
    kind = sniff_format(pair["image"])
    assert kind is not None, "a picture without a known format is not written to shards"
    facts = {"id": pair["id"], "captions": pair["captions"], "meta": pair["meta"]}
    return {
        "__key__": key_of(pair["id"]),
        _EXTENSIONS.get(kind, kind): pair["image"],
        "txt": pair["captions"][0].encode(),
        "json": json.dumps(facts, ensure_ascii=False).encode(),
    }
