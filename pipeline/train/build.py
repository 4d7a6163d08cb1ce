"""Everything that a run needs, put together from its recipe."""

from __future__ import annotations

import socket
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
from pipeline.train.further import FROZEN, FurtherInputs, frozen_captions_of
from pipeline.train.loop import Trainer
from pipeline.train.optim import make_optimizer
from pipeline.train.step import Stepper
from pipeline.train.stop import StopRequest
from pipeline.train.terms import Terms, make_terms
from pipeline.train.weights import TrainedWeights
from shards.overlap import overlap
from shards.reader import ShardReader, set_for_streaming, split_dir
from shards.receipt import read_receipt
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
    further = _further_inputs(terms, engine, encoder, train_dir, recipe, ranks, run)
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
    terms: Terms, engine: Any, encoder: Encoder, train_dir: Path, recipe: Recipe, ranks: Ranks, run: Run
) -> FurtherInputs:
    """What the objective needs of a batch; frozen captions are encoded before any weight moves, and kept."""
    needs = terms.objective.needs
    if FROZEN not in needs:
        return FurtherInputs(needs)
    engine.eval()
    captions = ShardReader(train_dir)
    return FurtherInputs(needs, frozen_captions_of(run, encoder, captions, recipe.evaluate.batch_size, ranks))


def _splits(recipe: Recipe, ranks: Ranks) -> tuple[Path, Path | None]:
    """The folders of the splits, checked once for all ranks.

    Raises:
        ValueError: A split is not there or damaged, or a machine has it in another state than the main rank's.
    """

    def check() -> dict[str, Any]:
        splits, state = _find_splits(recipe)
        for split in splits:
            quick_check(split)
        if len(splits) > 1 and (warning := overlap(splits[0], splits[1]).warning()):
            print(f"warning: {warning}", flush=True)
        return state

    checked = ranks.on_main(check)
    splits: list[Path] = []
    problem = None
    try:  # a machine may have a disk, or a cache, of its own
        splits, state = _find_splits(recipe)
        if state != checked:
            problem = "it is not that of the main rank's machine: copy it from there, or start again if it is just new"
    except (OSError, ValueError) as error:
        problem = str(error)
    said = f"{recipe.data.set} on {socket.gethostname()}: {problem}" if problem else None
    for problem_of_a_rank in filter(None, ranks.gather(said)):
        raise ValueError(problem_of_a_rank)
    return splits[0], splits[1] if len(splits) > 1 else None


def _find_splits(recipe: Recipe) -> tuple[list[Path], dict[str, Any]]:
    """The folders of the splits on this machine, brought to what is at a URL now; what tells them from other ones."""
    folder = set_for_streaming(recipe.data.set, Path(recipe.data.cache) if recipe.data.cache else None)
    names = [name for name in (recipe.data.train_split, recipe.data.val_split) if name is not None]
    receipt = read_receipt(folder)
    state = {name: receipt.splits.get(name) for name in names} if receipt else {}
    return [split_dir(folder, name) for name in names], state


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
        model.framework = make_framework(recipe.framework.name, recipe.framework.params(), model)
    return model.to(ranks.device), counts


def _initial_weights(recipe: Recipe, ranks: Ranks) -> Weights | None:
    """What `model.init` names; the main rank decides which run is the newest."""
    init = recipe.model.init
    if init is None:
        return None
    return read_weights(ranks.on_main(lambda: locate(init, recipe.run.root)))
