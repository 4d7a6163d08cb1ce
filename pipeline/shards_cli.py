"""`pipeline shards` on the command line."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shards.report import Progress

shards_app = typer.Typer(help="Image-caption pairs as MosaicML MDS shards.", no_args_is_help=True)


class Check(StrEnum):
    """How far a picture is looked at before it is written."""

    decode = "decode"
    header = "header"


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
        str | None,
        typer.Option(help="Its files: a path or a URL (default: data/SET, then $DATA_DIR/SET, then its official URL)."),
    ] = None,
    images: Annotated[str | None, typer.Option(help="Pictures, where apart: FOLDER, TAR or ZIP, or a URL.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder or object store, s3://... (default: data/mds/SET).")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of this set: key=value. May be repeated.")] = None,
    check: Annotated[Check, typer.Option(help="Decode every picture, or only read its header.")] = Check.decode,
    overwrite: Annotated[bool, typer.Option(help="Replace a set that is already there.")] = False,
    allow_missing: Annotated[int, typer.Option(min=0, help="How many pictures may be missing.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that check pictures; the set is the same.")] = 1,
    compression: Annotated[str, typer.Option(help="Of shards: none, zstd, zstd:7, gz, br, bz2, snappy.")] = "none",
    hashes: Annotated[str, typer.Option(help="Of shards, separated by commas: xxh64, sha256, ..., or none.")] = "xxh64",
    shard_size: Annotated[float, typer.Option(max=4096, help="MiB at which a shard is full.")] = 64,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only this share; see `pipeline shards merge`.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="In parts on a running Ray cluster, merged at the end.")] = False,
    parts: Annotated[
        int | None, typer.Option(min=1, help="With --ray: how many (default: as the cluster writes at once).")
    ] = None,
) -> None:
    """Write the shards of a data set in one pass. `make shards DATASET=...` is the same.

    The same command goes on after a stop, and does nothing where the set is there.
    """
    from shards.mds import ShardFormat
    from shards.parts import Part
    from shards.writer import write_set

    arguments: dict[str, Any] = {
        "source": source,
        "images": images,
        "out": out,
        "options": _key_values(option or []),
        "check": check.value,
        "overwrite": overwrite,
        "allow_missing": allow_missing,
        "workers": workers,
        "format": ShardFormat(
            compression=None if compression == "none" else compression,
            hashes=() if hashes == "none" else tuple(hashes.split(",")),
            size_limit=round(shard_size * (1 << 20)),
        ),
        "say": lambda line: typer.echo(line, err=True),
    }
    if (ray and part) or (parts and not ray):
        raise ValueError("--ray writes all parts, --parts says how many; --part is for other schedulers")
    if ray:
        from shards.on_ray import write_on_ray

        with _stoppable():
            report = write_on_ray(dataset, num_parts=parts, **arguments)
    else:
        with _stoppable(), progress_bar("pairs") as progress:
            share = Part.parse(part) if part else None
            report = write_set(dataset, part=share, progress=progress, **arguments)
    for line in report.lines():
        typer.echo(line)


@shards_app.command("merge")
def shards_merge(
    out: Annotated[str, typer.Argument(help="Folder or object store of the whole set.")],
    parts: Annotated[list[str], typer.Argument(metavar="PART...", help="All parts of it, in any order.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a set that is already there.")] = False,
) -> None:
    """One set out of the parts that `pipeline shards write --part I/N` wrote. Shards are linked where they can be."""
    from shards.merge import merge_parts

    with _stoppable():
        report = merge_parts(out, parts, overwrite)
    for line in report.lines():
        typer.echo(line)


@shards_app.command("to-webdataset")
def shards_to_webdataset(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, its name under data/mds, or its URL.")],
    out: Annotated[Path, typer.Argument(help="Folder of the tars.")],
    shard_size: Annotated[float, typer.Option(min=1, help="MB at which a tar is full.")] = 1000,
) -> None:
    """A set as WebDataset tars: KEY.jpg (the same bytes), KEY.txt, KEY.json. For those who train elsewhere."""
    from shards.reader import resolve_set
    from shards.to_webdataset import to_webdataset

    with progress_bar("pairs") as progress:
        counts = to_webdataset(resolve_set(folder), out, shard_size, progress)
    for split, count in counts.items():
        typer.echo(f"{out}/{split}-*.tar: {count} pairs")


@shards_app.command("verify")
def shards_verify(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, its name under data/mds, or its URL.")],
    decode: Annotated[bool, typer.Option(help="Also decode every picture.")] = True,
) -> None:
    """Re-read a whole set: sizes, hashes, counts, pictures."""
    from shards.reader import resolve_set
    from shards.verify import verify_set

    with progress_bar("pairs") as progress:
        report = verify_set(resolve_set(folder), decode=decode, progress=progress)
    for line in report.lines():
        typer.echo(line)
    if report.problems:
        raise typer.Exit(1)


@shards_app.command("info")
def shards_info(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, its name under data/mds, or its URL.")],
) -> None:
    """Counts, lengths of captions in words and CLIP tokens, duplicates, kinds and sizes of pictures, licence."""
    from shards.info import describe_set
    from shards.reader import resolve_set

    with progress_bar("pairs") as progress:
        info = describe_set(resolve_set(folder), progress=progress)
    for line in info.lines():
        typer.echo(line)


@shards_app.command("preview")
def shards_preview(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A set of shards, its name under data/mds, or its URL.")],
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


def _key_values(options: list[str]) -> dict[str, str]:
    for option in options:
        if "=" not in option:
            raise ValueError(f"--option takes key=value, not '{option}'")
    return dict(option.split("=", 1) for option in options)


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a plain line every ten seconds in a log."""
    from pipeline.progress import bar_or_lines

    with bar_or_lines(unit) as report:
        yield report


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with one line and exit code 130."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(str(stop) or "stopped", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
