"""Which split a file of pairs belongs to, where only its name says so."""

from __future__ import annotations

import re

from shards.sources.base import Option, hash_split

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_of_name(name: str) -> str | None:
    """The split that a file's name begins with or names among its parts, or None.

    >>> split_of_name("validation-00000-of-00004.parquet")
    'val'
    >>> split_of_name("coco_train_0001.tar"), split_of_name("latest.tar")
    ('train', None)
    """
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def split_option() -> Option:
    """The option `split` of a source whose files may be called after splits."""
    return Option("", "split of all pairs: a name, or hash for 80/10/10 by id; without it, by file name, else train")


def split_of(stated: str, file: str, id: str) -> str:
    """The split of a pair, by what `split_option` was answered with, the file's name and the pair's id."""
    return hash_split(id) if stated == "hash" else stated or split_of_name(file) or "train"
