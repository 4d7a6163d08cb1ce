"""`pipeline evaluate`: a model of any kind on a split of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.evaluate.encode import Encoder, TorchEncoder, encode_split
from pipeline.evaluate.recall import retrieval_metrics
from shards.overlap import overlap
from shards.reader import ShardReader, resolve_set, split_dir
from shards.report import Progress


def evaluate_model(
    model: str,
    folder: str,
    split: str,
    batch_size: int,
    runs: Path,
    progress: Callable[[Progress], None],
    rerank: int | None = None,
) -> dict[str, Any]:
    """Retrieval metrics, with what they were measured on, and `lines`, the same for a reader.

    Args:
        model: a bundle, a checkpoint, a run, weights of any format, or an open_clip NAME[:PRETRAINED].
        folder: a set of shards, or its name under data/mds.
        split: its split.
        batch_size: pairs per forward pass.
        runs: where runs are kept.
        progress: called with the pictures done.
        rerank: how many candidates of a query late interaction ranks again, figures of their own under `reranked`.

    Raises:
        ValueError: late interaction is asked of a model that has none.
    """
    reader = ShardReader(split_dir(resolve_set(folder), split))
    encoder, source, training = load_encoder(model, runs)

    def say(done: int) -> None:
        progress(Progress(done, len(reader), 0))

    if rerank is None:
        embeddings = encode_split(encoder, reader, batch_size, progress=say)
        metrics = retrieval_metrics(embeddings.image_embeds, embeddings.text_embeds, embeddings.owner)
    else:
        from pipeline.evaluate.rerank import evaluate_reranked

        metrics = evaluate_reranked(encoder, Path(source), reader, batch_size, rerank, say)
    warning = _overlap_warning(_training_split(training), resolve_set(folder) / split)
    negatives = training.get("negatives")
    trained = f"; trained with {negatives} negatives per positive" if negatives else ""
    cut = cut_share(encoder)
    lines = [
        *([warning] if warning else []),
        *([f"note: {training['note']}"] if "note" in training else []),
        f"{source} on {folder} {split}: {metrics['images']} images, {metrics['captions']} captions; "
        f"ties count against the model{trained}",
        *([f"{cut:.1%} of the captions are longer than the context and were cut"] if cut else []),
        *_table(metrics),
        *([f"the best {rerank} again, by 0.8 cosine + 0.2 late interaction:"] if rerank else []),
        *(_table(metrics["reranked"]) if rerank else []),
    ]
    what = {"model": source, "set": folder, "split": split, "negatives": negatives}
    return {**what, **metrics, "overlap": warning, "captions_cut": cut, "lines": lines}


def load_encoder(model: str, runs: Path) -> tuple[Encoder, str, dict[str, Any]]:
    """What encodes, its name in a table, and what its checkpoint says of its training; nothing for other models."""
    if (Path(model) / "onnx").is_dir():
        from export.runtime import Bundle

        return Bundle(Path(model)), model, {}
    from pipeline.config import ModelConfig
    from pipeline.model import build_model, load_checkpoint
    from pipeline.model.tokenizer import CaptionTokenizer
    from pipeline.preprocess import Preprocess

    training: dict[str, Any] = {}
    name, _, pretrained = model.partition(":")
    if not Path(model).exists() and not (runs / model).exists() and _is_open_clip_name(name):
        encoder, source = build_model(ModelConfig(name=name, pretrained=pretrained or None)).eval(), model
    else:
        encoder, training = load_checkpoint(model, runs)
        source = training["path"]
    preprocess = Preprocess.from_config(encoder.spec["preprocess_cfg"])
    return TorchEncoder(encoder, preprocess, CaptionTokenizer(encoder.spec)), source, training


def cut_share(encoder: Encoder) -> float | None:
    """The share of the captions encoded so far that were longer than the context; None for what does not count them."""
    tokenizer = getattr(encoder, "tokenizer", None)
    seen = getattr(tokenizer, "num_captions", 0)
    return tokenizer.num_cut / seen if tokenizer is not None and seen else None


def _training_split(training: dict[str, Any]) -> Path | None:
    """The split that a model trained on, where that is known and still there."""
    if "data_set" not in training:
        return None
    try:
        return split_dir(resolve_set(training["data_set"]), training["train_split"])
    except (ValueError, OSError):  # moved, or never on this machine
        return None


def _overlap_warning(trained_on: Path | None, evaluated: Path) -> str | None:
    """One line when the model has seen pairs of what it is evaluated on."""
    return overlap(trained_on, evaluated).warning() if trained_on is not None else None


def _is_open_clip_name(name: str) -> bool:
    import open_clip

    return name in open_clip.list_models()


def _table(metrics: dict[str, Any]) -> list[str]:
    return [_line(name, metrics[key]) for name, key in (("text to image", "t2i"), ("image to text", "i2t"))]


def _line(name: str, figures: dict[str, float]) -> str:
    recalls = "  ".join(f"R@{k} {v:6.2f}" for k, v in figures.items() if k.isdigit())
    return f"{name}: {recalls}  median rank {figures['median_rank']:.0f}"
