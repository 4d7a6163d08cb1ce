"""Recipes: one YAML file is one experiment.

A recipe is read in three steps: the file (and the one it `extends`), dotted overrides from the command line, then
validation by the models below. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import MarkedYAMLError, YAMLError

from pipeline.sections import AdapterConfig, DataConfig, ModelConfig, Section
from pipeline.training_sections import (
    BatchConfig,
    CheckpointConfig,
    EmaConfig,
    EvaluateConfig,
    LogConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TokenConfig,
)

DEFAULT_RECIPE = "default"
PLAIN = "plain"  # fine-tuning without a framework
_WORDS = ("objective", "framework", "adapters")  # sections for which their `name` alone may stand
_WORD = re.compile(rf"^({'|'.join(_WORDS)})=(?=\w)")


class _Chosen(BaseModel):
    """One of several, by name, each of which takes parameters of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def params(self) -> dict[str, Any]:
        """The parameters beside the name, as the recipe states them."""
        return dict(self.model_extra or {})


class ObjectiveConfig(_Chosen):
    """The contrastive objective: its name, and the parameters that this objective takes."""

    @model_validator(mode="after")
    def _known(self) -> ObjectiveConfig:
        from pipeline.objective import make_objective

        try:
            make_objective(self.name, **self.params())
        except TypeError as error:
            raise ValueError(f"a parameter of '{self.name}' is of the wrong kind: {error}") from error
        return self


class FrameworkConfig(_Chosen):
    """The framework: its name (`plain` is none), and the options that this framework takes."""

    name: str = PLAIN

    @model_validator(mode="after")
    def _known(self) -> FrameworkConfig:
        if self.name == PLAIN:
            if self.params():
                raise ValueError(f"framework '{PLAIN}' has no options")
            return self
        from pipeline.frameworks import config_of

        config_of(self.name, self.params())
        return self


class Recipe(Section):
    """One experiment, complete."""

    recipe: str = Field(description="the recipe's name, set when it is read")
    data: DataConfig
    model: ModelConfig
    objective: ObjectiveConfig
    token: TokenConfig = TokenConfig()
    framework: FrameworkConfig = FrameworkConfig()
    adapters: AdapterConfig = AdapterConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ema: EmaConfig = EmaConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()

    def negatives(self, world_size: int) -> dict[str, int]:
        """Negatives per positive that the objective sees, and the token term where there is one."""
        found = {"negatives": self.batch.num_negatives(world_size)}
        if self.token.weight:
            found["token_negatives"] = self.token.num_negatives(self.batch)
        return found

    def to_yaml(self) -> str:
        """The recipe with every default spelled out."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))


def suggest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known word, or '' when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def find_config(name: str, folder: str, suffix: str) -> Path:
    """A config file by path, else by name in `configs/<folder>`.

    Raises:
        FileNotFoundError: neither is there; names the nearest and all that ship.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = _shipped(folder)
    for candidate in (shipped / name, shipped / f"{name}{suffix}"):
        if candidate.is_file():
            return candidate
    names = shipped_names(folder, suffix)
    raise FileNotFoundError(
        f"no file '{name}', and no such name in configs/{folder}{suggest(path.stem, names) or '.'} "
        f"There are: {', '.join(names)}"
    )


def shipped_names(folder: str, suffix: str) -> list[str]:
    """The names that `find_config` knows in `configs/<folder>`."""
    return sorted(path.stem for path in _shipped(folder).glob(f"*{suffix}"))


def _shipped(folder: str) -> Path:
    return Path(str(resources.files("configs"))) / folder


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or path and apply dotted overrides (`objective.gamma=0.25`).

    Raises:
        ValueError: a malformed override, an unknown key (names the nearest), or a value of the wrong kind.
        FileNotFoundError: no such recipe.
    """
    path = find_config(name, "recipes", ".yaml")
    values = _overridden(lambda: _read_with_parents(path, ()), overrides, name)
    return parse_recipe({**values, "recipe": path.stem}, source=str(name))


def override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A recipe with dotted overrides applied.

    Raises:
        ValueError: as `load_recipe`.
    """
    values = _overridden(lambda: OmegaConf.create(recipe.model_dump(mode="json")), overrides, recipe.recipe)
    return parse_recipe(values, recipe.recipe)


def _overridden(read: Callable[[], Any], overrides: Sequence[str], name: str) -> dict[Any, Any]:
    for item in overrides:
        if "=" not in item:
            raise ValueError(f"--set takes key=value, not '{item}'")
    # As whole entries: `framework=goal` would be lost to a `framework.patch_weight=0.1` beside it.
    entries = [_WORD.sub(r"\1.name=", item) for item in overrides]
    try:
        merged = _merge_over(read(), OmegaConf.from_dotlist(entries))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"recipe '{name}': {_in_one_line(error)}") from error
    assert isinstance(values, dict)
    return values


def parse_recipe(values: dict[Any, Any], source: str) -> Recipe:
    """Validate plain values as a recipe; `source` names them in errors."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"recipe '{source}': " + "; ".join(_explain(e) for e in error.errors())) from error


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> Any:
    """The recipe file merged over the one that it `extends`."""
    if path.resolve() in children:
        raise ValueError(f"recipe {path} extends itself through {' -> '.join(p.stem for p in children)}")
    try:
        values = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:  # OmegaConf's own OSError for a file that holds one number
        raise ValueError(f"recipe {path} cannot be read: {error}") from error
    if not isinstance(values, DictConfig):
        raise ValueError(f"recipe {path} is not a mapping of sections; see configs/recipes for examples")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    beside = path.parent / f"{parent}.yaml"
    parent_path = beside if beside.is_file() else find_config(str(parent), "recipes", ".yaml")
    return _merge_over(_read_with_parents(parent_path, (*children, path.resolve())), values)


def _merge_over(base: Any, values: Any) -> Any:
    """`values` over `base`. Another objective or framework takes other parameters, so it does not inherit them."""
    for section in _WORDS:
        for part in (base, values):
            word = OmegaConf.select(part, section)
            if isinstance(word, str):  # `objective: hn` is short for `objective: {name: hn}`
                part[section] = {"name": word}
        name = OmegaConf.select(values, f"{section}.name")
        if section != "adapters" and name is not None and name != OmegaConf.select(base, f"{section}.name"):
            base.pop(section, None)
    return OmegaConf.merge(base, values)


def _in_one_line(error: Exception) -> str:
    """What is wrong and where; parsers and OmegaConf spread it over several lines."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"no YAML: {error.problem} ({mark.name}, line {mark.line + 1}, column {mark.column + 1})"
    return str(error).splitlines()[0]


def _explain(error: Any) -> str:
    """One validation error as 'key: what is wrong'."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key '{where}'{suggest(str(error['loc'][-1]), _fields_at(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"'{where}' is required"
    return f"'{where}': {error['msg'].removeprefix('Value error, ')}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """The known keys of the section at `loc`."""
    model: type[BaseModel] = Recipe
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)
