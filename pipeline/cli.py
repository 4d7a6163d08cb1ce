"""The command line. A command is a thin function that imports what it needs inside, so that --help answers at once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shards.report import Progress

app = typer.Typer(
    name="pipeline",
    help="Dense-caption retrieval: shards, training, evaluation, ONNX export, search.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
shards_app = typer.Typer(help="Image-caption pairs as MosaicML MDS shards.", no_args_is_help=True)
app.add_typer(shards_app, name="shards")


class Check(StrEnum):
    """How far a picture is looked at before it is written."""

    decode = "decode"
    header = "header"


Root = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]


@shards_app.command("list")
def shards_list() -> None:
    """The data sets that can be sharded, with what each needs."""
    from shards.sources import SOURCES

    for source in SOURCES.values():
        typer.echo(f"{source.name:<15} {source.summary}")
        typer.echo(f"{'':<15} licence: {source.licence}")
        typer.echo(f"{'':<15} needs: {source.needs}")
        for name, option in source.options.items():
            choices = f", of {', '.join(option.choices)}" if option.choices else ""
            default = f" (default: {option.default})" if option.default else ""
            typer.echo(f"{'':<15} --option {name}=...  {option.help}{choices}{default}")


@shards_app.command("write")
def shards_write(
    dataset: Annotated[str, typer.Argument(help="A data set of `pipeline shards list`.")],
    source: Annotated[
        str | None, typer.Option(help="Where its files are (default: data/SET, then $DATA_DIR/SET).")
    ] = None,
    images: Annotated[str | None, typer.Option(help="Pictures, where apart: FOLDER, TAR or ZIP.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the shards (default: data/mds/SET).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of this set: key=value. May be repeated.")] = None,
    check: Annotated[Check, typer.Option(help="Decode every picture, or only read its header.")] = Check.decode,
    overwrite: Annotated[bool, typer.Option(help="Replace a set that is already there.")] = False,
    allow_missing: Annotated[int, typer.Option(min=0, help="How many pictures may be missing.")] = 0,
) -> None:
    """Write the shards of a data set in one pass. `make shards DATASET=...` is the same."""
    from shards.writer import write_set

    with _progress("pairs") as progress:
        report = write_set(
            dataset,
            source=source,
            images=images,
            out=out,
            options=_key_values(option or []),
            check=check.value,
            overwrite=overwrite,
            allow_missing=allow_missing,
            progress=progress,
        )
    for line in report.lines():
        typer.echo(line)


@shards_app.command("verify")
def shards_verify(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
    decode: Annotated[bool, typer.Option(help="Also decode every picture.")] = True,
) -> None:
    """Re-read a whole set: sizes, hashes, counts, pictures."""
    from shards.reader import resolve_set
    from shards.verify import verify_set

    with _progress("pairs") as progress:
        report = verify_set(resolve_set(folder), decode=decode, progress=progress)
    for line in report.lines():
        typer.echo(line)
    if report.problems:
        raise typer.Exit(1)


@shards_app.command("info")
def shards_info(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
) -> None:
    """Counts, lengths of captions in words and CLIP tokens, duplicates, kinds and sizes of pictures, licence."""
    from shards.info import describe_set
    from shards.reader import resolve_set

    with _progress("pairs") as progress:
        info = describe_set(resolve_set(folder), progress=progress)
    for line in info.lines():
        typer.echo(line)


@shards_app.command("preview")
def shards_preview(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
    out: Annotated[Path | None, typer.Option(help="The page (default: DIR.html, beside the set).")] = None,
    count: Annotated[int, typer.Option(min=1, help="About how many pairs.")] = 60,
) -> None:
    """A contact sheet of a set: one HTML page with some pairs of each split."""
    from shards.preview import write_preview
    from shards.reader import resolve_set

    path = resolve_set(folder)
    page = out or path.resolve().parent / f"{path.resolve().name}.html"
    typer.echo(f"{page}: {write_preview(path, page, count)} pairs")


@shards_app.command("overlap")
def shards_overlap(
    first: Annotated[str, typer.Argument(metavar="A", help="A set, its name under data/mds, or one split's folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The set or split that it is compared with.")],
) -> None:
    """The pairs that two sets share: by id, by picture, by caption."""
    from shards.overlap import overlaps

    for found in overlaps(first, second):
        typer.echo(found.line())


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
    model: Annotated[str, typer.Argument(help="A checkpoint, a run, a bundle, or an open_clip NAME[:PRETRAINED].")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, or its name under data/mds.")],
    split: Annotated[str, typer.Option(help="Which split.")] = "test",
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs per forward pass.")] = 64,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    runs: Root = Path("runs"),
) -> None:
    """Recall@1, 5, 10 and median rank on a split, text to image and image to text."""
    from pipeline.evaluate.command import evaluate_model
    from pipeline.runs import write_json

    with _progress("pictures") as progress:
        metrics = evaluate_model(model, folder, split, batch_size, runs, progress)
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


def _key_values(options: list[str]) -> dict[str, str]:
    for option in options:
        if "=" not in option:
            raise ValueError(f"--option takes key=value, not '{option}'")
    return dict(option.split("=", 1) for option in options)


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a plain line every ten seconds in a log."""
    from pipeline.progress import bar_or_lines

    with bar_or_lines(unit) as report:
        yield report


if __name__ == "__main__":
    main()
