"""Frameworks by the words that recipes use."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pipeline.frameworks.base import Framework
from pipeline.frameworks.finelip import FineLip
from pipeline.frameworks.goal import Goal
from pipeline.frameworks.longclip import LongClip
from pipeline.frameworks.structxlip import StructXlip
from pipeline.model import DualEncoder
from pipeline.objective.registry import unknown_name
from pipeline.sections import Section

FRAMEWORKS: dict[str, type[Framework]] = {
    "longclip": LongClip,
    "finelip": FineLip,
    "goal": Goal,
    "structxlip": StructXlip,
}


def config_of(name: str, options: dict[str, Any]) -> Section:
    """The options of a framework, checked.

    Raises:
        ValueError: no framework has that name, or an option is unknown or of the wrong kind.
    """
    if name not in FRAMEWORKS:
        raise ValueError(unknown_name("framework", name, list(FRAMEWORKS)))
    kind = FRAMEWORKS[name].Config
    for option in options:
        if option not in kind.model_fields:
            raise ValueError(unknown_name(f"option of the framework {name!r}", option, list(kind.model_fields)))
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"]) or name
        raise ValueError(f"{where}: {found['msg'].removeprefix('Value error, ')}") from error


def make_framework(name: str, options: dict[str, Any], model: DualEncoder) -> Framework:
    """A framework on a model; errors as `config_of` and the framework have them."""
    return FRAMEWORKS[name](config_of(name, options), model)
