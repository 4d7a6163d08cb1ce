"""What a user asks of a source: checked, completed, and in the form that a receipt keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.images import CheckLevel
from shards.sources.base import Request, Source


def make_request(source: Source, path: str | None, images: str | None, options: Mapping[str, str]) -> Request:
    """Check what a user asked for against what the source declares, and fill in defaults.

    Raises:
        ValueError: An argument or option that the source does not take.
    """
    if path and not source.takes_source:
        raise ValueError(f"{source.name} takes no SOURCE. It needs: {source.needs}")
    if images and not source.takes_images:
        raise ValueError(f"{source.name} takes no IMAGES. It needs: {source.needs}")
    for key, value in options.items():
        option = source.options.get(key)
        if option is None:
            raise ValueError(f"{source.name} has no option {key!r}; its options: {', '.join(source.options) or 'none'}")
        if option.choices and value not in option.choices:
            raise ValueError(f"{source.name}: option {key} is one of {', '.join(option.choices)}, not {value!r}")
    filled = {key: options.get(key, option.default) for key, option in source.options.items()}
    return Request(Path(path).expanduser() if path else None, Path(images).expanduser() if images else None, filled)


def record(request: Request, check: CheckLevel) -> dict[str, Any]:
    """The request as a receipt keeps it. An edited file is another request; a folder is known by its path."""
    return {
        "source": _path_record(request.source),
        "images": _path_record(request.images),
        "options": dict(request.options),
        "check": check,
    }


def _path_record(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    record: dict[str, Any] = {"path": os.path.abspath(path)}
    if path.is_file():
        stat = path.stat()
        record |= {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    return record


def difference(old_name: str, old: Mapping[str, Any], name: str, new: Mapping[str, Any]) -> str:
    """Say in which respects two recorded requests differ."""
    changes = [f"the data set was {old_name}"] if old_name != name else []
    for key in ("source", "images"):
        before, after = old[key], new[key]
        if before and after and before["path"] == after["path"]:
            changes += [f"{key} {after['path']!r} has changed since"] if before != after else []
        elif before != after:
            changes.append(f"{key} was {_shown(before)}, now {_shown(after)}")
    settings = {**new["options"], "check": new["check"]}
    before = {**old["options"], "check": old["check"]}
    changes += [
        f"{key} was {before.get(key)!r}, now {value!r}" for key, value in settings.items() if before.get(key) != value
    ]
    return "; ".join(changes)


def _shown(path: Mapping[str, Any] | None) -> str:
    return repr(path["path"]) if path else "the default"
