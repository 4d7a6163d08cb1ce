"""Everything that a run needs, put together from its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import PLAIN, Recipe
from pipeline.data import TrainingData
from pipeline.evaluate.encode import Encoder, TorchEncoder
from pipeline.frameworks import make_framework
from pipeline.model import DualEncoder, build_model
from pipeline.model.adapters import adapt
from pipeline.model.formats import Weights, locate, read_weights
from pipeline.model.freeze import freeze_layers, set_trainable
from pipeline.model.memory import checkpoint_gradients
from pipeline.model.positions import freeze_positions
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import check_tokens
from pipeline.preprocess import Preprocess
from pipeline.runs import Run
from pipeline.train.distributed import Ranks
from pipeline.train.engine import make_engine, micro_batch_size
from pipeline.train.further import FROZEN, FurtherInputs, freeze_captions
from pipeline.train.loop import Trainer
from pipeline.train.optim import make_optimizer
from pipeline.train.step import Stepper
from pipeline.train.stop import StopRequest
from pipeline.train.terms import Terms, make_terms
from pipeline.train.weights import TrainedWeights
from shards.overlap import overlap
from shards.reader import ShardReader, set_for_streaming, split_dir
from shards.verify import quick_check


def build_trainer(recipe: Recipe, deepspeed_config: dict[str, Any], ranks: Ranks, run: Run) -> Trainer:
    """Check the shards, build model, optimizer, engine, data and objective.

    Raises:
        ValueError: anything in the recipe that does not fit the data, the model or the ranks.
    """
    micro_batch = micro_batch_size(recipe.batch, ranks.world_size)
    train_dir, val_dir = _splits(recipe, ranks)
    model, num_parameters = _model(recipe, ranks)
    preprocess = Preprocess.from_config(model.spec["preprocess_cfg"])
    tokenizer = CaptionTokenizer(model.spec)
    data = TrainingData(
        train_dir,
        preprocess,
        tokenizer,
        batch_size=micro_batch,
        world_size=ranks.world_size,
        workers=recipe.data.workers,
        seed=recipe.run.seed,
        captions=recipe.data.captions,
        augment=recipe.data.augment,
        views=model.framework and model.framework.views(preprocess),
    )
    optimizer = make_optimizer(model.clip, recipe.optimizer, model.framework)
    engine = make_engine(model, optimizer, deepspeed_config, recipe.batch, micro_batch)
    encoder = TorchEncoder(engine, preprocess, tokenizer, ranks.device, next(engine.module.parameters()).dtype)
    terms = make_terms(recipe, ranks.rank, model.framework)
    further = _further_inputs(terms, engine, encoder, train_dir, recipe, ranks)
    return Trainer(
        recipe=recipe,
        engine=engine,
        weights=TrainedWeights(engine, ranks, recipe.ema.decay),
        stepper=Stepper(engine, terms, further, ranks, recipe.batch.accumulate, recipe.run.seed),
        data=data,
        encoder=encoder,
        val=ShardReader(val_dir) if val_dir else None,
        ranks=ranks,
        run=run,
        stop=StopRequest(),
        num_parameters=num_parameters,
    )


def _further_inputs(
    terms: Terms, engine: Any, encoder: Encoder, train_dir: Path, recipe: Recipe, ranks: Ranks
) -> FurtherInputs:
    """What the objective needs of a batch; frozen captions are encoded now, before any weight moves or is resumed."""
    needs = terms.objective.needs
    if FROZEN not in needs:
        return FurtherInputs(needs)
    engine.eval()
    return FurtherInputs(needs, freeze_captions(encoder, ShardReader(train_dir), recipe.evaluate.batch_size, ranks))


def _splits(recipe: Recipe, ranks: Ranks) -> tuple[Path, Path | None]:
    """The folders of the splits, checked once for all ranks."""

    cache = Path(recipe.data.cache) if recipe.data.cache else None

    def find() -> tuple[Path, Path | None]:
        folder = set_for_streaming(recipe.data.set, cache)
        splits = [split_dir(folder, s) for s in (recipe.data.train_split, recipe.data.val_split) if s is not None]
        for split in splits:
            quick_check(split)
        if len(splits) > 1 and (warning := overlap(splits[0], splits[1]).warning()):
            print(f"warning: {warning}", flush=True)
        return splits[0], splits[1] if len(splits) > 1 else None

    found = ranks.on_main(find)
    if not found[0].is_dir():
        set_for_streaming(recipe.data.set, cache)  # a rank of another machine, which has a cache of its own
    return found


def _model(recipe: Recipe, ranks: Ranks) -> tuple[DualEncoder, tuple[int, int]]:
    """The model with its starting weights, the same on every rank, and how many parameters train and are frozen."""
    import torch

    torch.manual_seed(recipe.run.seed)  # fresh layers are drawn alike on every rank
    model = build_model(recipe.model, _initial_weights(recipe, ranks))
    if recipe.token.weight:
        check_tokens(model.clip)
    if recipe.adapters.name != "none":
        counts = adapt(model, recipe.adapters, recipe.model.trainable, recipe.model.freeze)
    else:
        set_trainable(model.clip, recipe.model.trainable)
        counts = freeze_layers(model.clip, recipe.model.freeze)
    if recipe.model.freeze_positions is not None:
        freeze_positions(model.clip.text, recipe.model.freeze_positions)
    if recipe.model.grad_checkpointing:
        checkpoint_gradients(model.clip)
    if recipe.framework.name != PLAIN:
        model.framework = make_framework(recipe.framework.name, recipe.framework.options(), model)
    return model.to(ranks.device), counts


def _initial_weights(recipe: Recipe, ranks: Ranks) -> Weights | None:
    """What `model.init` names; the main rank decides which run is the newest."""
    init = recipe.model.init
    if init is None:
        return None
    return read_weights(ranks.on_main(lambda: locate(init, recipe.run.root)))
