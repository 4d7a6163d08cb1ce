"""What a user asks of a source: checked, completed, and in the form that a receipt keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shards.images import CheckLevel
from shards.location import Location, location
from shards.location import record as record_place
from shards.sources.base import Option, Request, Source, default_places


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
    home = None if path else _official_place(source)
    place = location(path) if path else home
    return Request(place, location(images) if images else None, filled, by_default=home is not None)


def _official_place(source: Source) -> Location | None:
    """Where a source is read from that nobody stated and that is not here: its home, or that of $PIPELINE_MIRROR."""
    if not source.home or any(place.exists() for place in default_places(source.name)):
        return None
    mirror = os.environ.get("PIPELINE_MIRROR")
    return location(f"{mirror.rstrip('/')}/{source.name}/" if mirror else source.home)


def _in_order(option: Option, value: str) -> str:
    """Several choices are one request in whatever order they are stated."""
    return ",".join(choice for choice in option.choices if choice in value.split(",")) if option.several else value


def record(source: Source, request: Request, check: CheckLevel) -> dict[str, Any]:
    """The request as a receipt keeps it. An edited file is another request; a folder is known by its path."""
    options: dict[str, Any] = dict(request.options)
    for key, option in source.options.items():
        if option.is_path and options[key]:
            options[key] = record_place(location(options[key]))
    return {
        "source": None if request.by_default else record_place(request.source),
        "images": record_place(request.images),
        "options": options,
        "check": check,
    }


def origin(request: Request) -> dict[str, Any] | None:
    """The official place, where it is read because none was stated: no part of the request, as data/<name> is none."""
    return record_place(request.source) if request.by_default else None


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
    if isinstance(before, dict) and isinstance(after, dict) and _place(before) == _place(after):
        return [f"{key} {_place(after)!r} has changed since"]
    return [f"{key} was {_shown(before)}, now {_shown(after)}"]


def _place(record: dict[str, Any]) -> str:
    return str(record["url"] if "url" in record else record["path"])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return repr(_place(value))
    return "the default" if value in (None, "") else repr(value)
