"""What a user asks of a source: checked, completed, and in the form that a receipt keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.images import CheckLevel
from shards.sources.base import Option, Request, Source


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
        for part in value.split(",") if option.several else [value]:
            if option.choices and part not in option.choices:
                kind = "some of" if option.several else "one of"
                raise ValueError(f"{source.name}: option {key} is {kind} {', '.join(option.choices)}, not {part!r}")
    filled = {key: _in_order(option, options.get(key, option.default)) for key, option in source.options.items()}
    return Request(Path(path).expanduser() if path else None, Path(images).expanduser() if images else None, filled)


def _in_order(option: Option, value: str) -> str:
    """Several choices are one request in whatever order they are stated."""
    return ",".join(choice for choice in option.choices if choice in value.split(",")) if option.several else value


def record(source: Source, request: Request, check: CheckLevel) -> dict[str, Any]:
    """The request as a receipt keeps it. An edited file is another request; a folder is known by its path."""
    options: dict[str, Any] = dict(request.options)
    for key, option in source.options.items():
        if option.is_path and options[key]:
            options[key] = _path_record(Path(options[key]).expanduser())
    return {
        "source": _path_record(request.source),
        "images": _path_record(request.images),
        "options": options,
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
    for key in ("source", "images", "check"):
        changes += _change(key, old[key], new[key])
    for key in new["options"]:
        changes += _change(key, old["options"].get(key), new["options"][key])
    return "; ".join(changes)


def _change(key: str, before: Any, after: Any) -> list[str]:
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and before["path"] == after["path"]:
        return [f"{key} {after['path']!r} has changed since"]
    return [f"{key} was {_shown(before)}, now {_shown(after)}"]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return repr(value["path"])
    return "the default" if value in (None, "") else repr(value)
