"""Recipes: one YAML file is one experiment.

A recipe is read in three steps: the file (and the one it `extends`), dotted overrides from the command line, then
validation by the models below. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from yaml import MarkedYAMLError, YAMLError

DEFAULT_RECIPE = "default"


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    """Where the pairs are. `set` is a folder of shards or a name under data/mds."""

    set: str
    train_split: str = "train"
    val_split: str | None = "val"
    workers: int = Field(2, ge=0, description="loader processes of each rank; 0 loads in the rank itself")


class ModelConfig(Section):
    """Which dual encoder, where its weights come from, and which of its parameters train."""

    name: str = Field(description="a config in configs/models, a path to one, or an open_clip model name")
    pretrained: str | None = Field(None, description="an open_clip tag or a weights file, for open_clip names")
    init: str | None = Field(None, description="start from this run, checkpoint, or the newest run of this recipe")
    image_size: PositiveInt | None = Field(None, description="pixels; the model's own when not given")
    context_length: PositiveInt | None = Field(None, description="tokens a caption is cut to; the model's own if unset")
    trainable: list[str] = Field(["*"], description="shell patterns of the parameter names that train")


class ObjectiveConfig(BaseModel):
    """The contrastive objective: its name, and the parameters that this objective takes."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def params(self) -> dict[str, Any]:
        """The parameters beside the name, as the recipe states them."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> ObjectiveConfig:
        from pipeline.objective import make_objective

        try:
            make_objective(self.name, **self.params())
        except TypeError as error:
            raise ValueError(f"a parameter of '{self.name}' is of the wrong kind: {error}") from error
        return self


class BatchConfig(Section):
    """`size` pairs per optimizer step over all ranks, in `accumulate` micro-batches, and where negatives come from.

    micro: one micro-batch over all ranks. rank: all micro-batches of one rank, without any exchange between ranks.
    global: all micro-batches of all ranks. With rank and global, features are cached and micro-batches encoded twice
    (GradCache): the gradient is that of the full batch in the memory of a micro-batch.
    """

    size: PositiveInt
    accumulate: PositiveInt = 1
    negatives: Literal["micro", "rank", "global"] = "micro"

    def num_negatives(self, world_size: int) -> int:
        """Negatives per positive that the objective sees."""
        parts = {"micro": self.accumulate, "rank": world_size, "global": 1}[self.negatives]
        return self.size // parts - 1


class TokenConfig(Section):
    """Late interaction between patches and words, `weight` times L_tok on top of the objective; 0 is off.

    micro: over one micro-batch of all ranks, as in the paper. global: over all micro-batches of all ranks; token
    features are cached then, and travel between the ranks.
    """

    weight: float = Field(0.0, ge=0)
    scope: Literal["micro", "global"] = "micro"

    def num_negatives(self, batch: BatchConfig) -> int:
        """Negatives per positive that the token term sees."""
        return batch.size // (batch.accumulate if self.scope == "micro" else 1) - 1


class OptimizerConfig(Section):
    """AdamW. Biases, norms and the temperature are not decayed."""

    lr: float = Field(gt=0)
    lr_overrides: dict[str, float] = Field({}, description="learning rate by shell pattern of the parameter name")
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)


class ScheduleConfig(Section):
    """Linear warm-up, then half a cosine to zero at the last step."""

    epochs: PositiveInt
    warmup_steps: int = Field(0, ge=0)


class EvaluateConfig(Section):
    """Validation retrieval after every so many epochs."""

    every_epochs: PositiveInt = 1
    batch_size: PositiveInt = 64


class CheckpointConfig(Section):
    """A checkpoint is written after every epoch, when stopped, and every `every_steps` optimizer steps if set."""

    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2


class RunConfig(Section):
    """Where the run lives and what makes it reproducible."""

    root: str = "runs"
    name: str | None = Field(None, description="folder under root; the recipe's name, numbered, when not given")
    seed: int = 42
    log_every: PositiveInt = 10


class Recipe(Section):
    """One experiment, complete."""

    recipe: str = Field(description="the recipe's name, set when it is read")
    data: DataConfig
    model: ModelConfig
    objective: ObjectiveConfig
    token: TokenConfig = TokenConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

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
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"--set takes key=value, not '{override}'")
    try:
        merged = _merge_over(_read_with_parents(path, ()), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"recipe '{name}': {_in_one_line(error)}") from error
    assert isinstance(values, dict)
    return parse_recipe({**values, "recipe": path.stem}, source=str(name))


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
    """`values` over `base`. Another objective takes other parameters, so it does not inherit them."""
    name = OmegaConf.select(values, "objective.name")
    if name is not None and name != OmegaConf.select(base, "objective.name"):
        base.pop("objective", None)
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
