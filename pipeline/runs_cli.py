"""`pipeline runs` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

runs_app = typer.Typer(help="The runs that there are, and how they went.", invoke_without_command=True)

_Root = Annotated[Path | None, typer.Option("--runs", help="Where runs are kept.  [default: runs]")]


@runs_app.callback()
def runs(
    context: typer.Context,
    root: _Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """List the runs: recipe, state, step, best validation R@1, age. `pipeline runs show NAME` shows one."""
    if context.invoked_subcommand is None:
        from pipeline.runs_command import list_runs

        list_runs(root or Path("runs"), as_json)
    else:
        context.obj = (root, as_json)  # said before `show`


@runs_app.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A run of `pipeline runs`, a folder, or a recipe: its newest run.")],
    root: _Root = None,
    png: Annotated[Path | None, typer.Option(help="The picture (default: curves.png in the run).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Facts and metrics for scripts.")] = False,
) -> None:
    """One run: its facts, its curves in the width of the terminal, and the same as a PNG."""
    from pipeline.runs_command import show_run

    above_root, above_json = context.obj
    show_run(name, root or above_root or Path("runs"), png, as_json or above_json)
