"""The command line. A command is a thin function that imports what it needs inside, so that --help answers at once."""

from __future__ import annotations

import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.runs_cli import runs_app
from pipeline.shards_cli import progress_bar as _progress
from pipeline.shards_cli import shards_app

app = typer.Typer(
    name="pipeline",
    help="Dense-caption retrieval: shards, training, evaluation, ONNX export, search.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(shards_app, name="shards")
app.add_typer(runs_app, name="runs")


class ModelFormat(StrEnum):
    """What others read weights in."""

    open_clip = "open_clip"
    hf = "hf"
    longclip = "longclip"


Root = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]


@app.command()
def train(
    config: Annotated[str, typer.Option(help="DeepSpeed JSON: a path, or a name in configs/.")] = "zero2.json",
    recipe: Annotated[str | None, typer.Option(help="A path, or a name in configs/recipes (default: HN-CLIP).")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Recipe override key=value. Repeatable.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a run: auto, a run or a checkpoint.")] = None,
) -> None:
    """Train in this one process; for several ranks: deepspeed launcher/train.py --config zero2.json."""
    from pipeline.train.entry import Launch, main

    raise typer.Exit(main(Launch(config, recipe, overrides or [], resume)))


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint, a run, a bundle, weights of any format, or open_clip's NAME[:PRETRAINED]."),
    ],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
    split: Annotated[str, typer.Option(help="Which split.")] = "test",
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs per forward pass.")] = 64,
    rerank: Annotated[
        int | None, typer.Option(min=1, help="FineLIP's runs: rank so many candidates again by late interaction.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    runs: Root = Path("runs"),
) -> None:
    """Recall@1, 5, 10 and median rank on a split, text to image and image to text."""
    from pipeline.evaluate.command import evaluate_model
    from pipeline.runs import write_json

    with _progress("pictures") as progress:
        metrics = evaluate_model(model, folder, split, batch_size, runs, progress, rerank)
    if json_out is not None:
        json_out.parent.mkdir(parents=True, exist_ok=True)
        write_json(json_out, metrics)
    for line in metrics.pop("lines"):
        typer.echo(line)


@app.command()
def export(
    checkpoint: Annotated[str | None, typer.Argument(help="A run or checkpoint (default: the newest run).")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Two ONNX graphs, parity-checked, in a folder.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the bundle (default: bundle/ in the run).")] = None,
    data: Annotated[str | None, typer.Option(help="Shards for the parity check (default: the run's own).")] = None,
    opset: Annotated[int, typer.Option(help="ONNX operator set.")] = 18,
    runs: Root = Path("runs"),
) -> None:
    """Export the encoders for serving: pipeline export --onnx."""
    if not onnx:
        raise ValueError("say which format: pipeline export --onnx")
    from export.command import export_checkpoint

    export_checkpoint(checkpoint, out, data, opset, runs, say=typer.echo)


@app.command()
def convert(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A run, a checkpoint or weights of any format (default: the newest run).")
    ] = None,
    to: Annotated[
        ModelFormat | None, typer.Option(help="open_clip and hf are folders, longclip is a .pt file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder or file.")] = None,
    runs: Root = Path("runs"),
) -> None:
    """Weights for open_clip, Hugging Face's CLIPModel or Long-CLIP's own code."""
    if to is None or out is None:
        raise ValueError("say which format and where: pipeline convert RUN --to open_clip|hf|longclip --out PATH")
    from export.convert import convert_checkpoint

    convert_checkpoint(checkpoint, to.value, out, runs, say=typer.echo)


@app.command()
def index(
    bundle: Annotated[Path, typer.Argument(help="A bundle of `pipeline export --onnx`.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
    out: Annotated[Path, typer.Option(help="Folder of the index.")],
    split: Annotated[str, typer.Option(help="Which split.")] = "test",
) -> None:
    """Embed every picture of a split with ONNX Runtime, for `pipeline search`."""
    from export.serving.index import build_index
    from shards.reader import ShardReader, resolve_set, split_dir
    from shards.report import Progress

    pictures = split_dir(resolve_set(folder), split)
    count = len(ShardReader(pictures))
    with _progress("pictures") as progress:
        build_index(bundle, pictures, out, progress=lambda done: progress(Progress(done, count, 0)))
    typer.echo(f"{out}: {count} pictures; next: pipeline search {out} 'what you look for'")


@app.command()
def search(
    index: Annotated[Path, typer.Argument(help="An index of `pipeline index`.")],
    query: Annotated[str, typer.Argument(help="What to look for.")],
    top: Annotated[int, typer.Option(min=1, help="How many results.")] = 5,
    html: Annotated[Path | None, typer.Option(help="Also write a sheet of the pictures.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Where the index's bundle is now, if it was moved.")] = None,
) -> None:
    """The pictures that fit a text best, through ONNX Runtime alone."""
    from export.serving.search import search as search_index
    from export.serving.sheet import write_sheet

    hits = search_index(index, query, top, bundle)
    for hit in hits:
        typer.echo(f"{hit.rank:>3}  {hit.score:.4f}  {hit.id}  {hit.caption}")
    if html is not None:
        write_sheet(hits, query, html)
        typer.echo(f"sheet: {html}")


def main() -> None:
    """Run the command line; what users get wrong is one line and exit code 2, never a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("PIPELINE_DEBUG"):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
