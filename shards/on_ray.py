"""The parts of a set on a Ray cluster, then merged: `pipeline shards write --ray`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from shards.mds import SETS
from shards.merge import merge_parts
from shards.output import open_work
from shards.parts import Part
from shards.remote.filesystem import open_filesystem
from shards.report import Report
from shards.work import written_before
from shards.writer import REQUEST, prepare, write_set


def write_on_ray(
    name: str,
    *,
    num_parts: int | None = None,
    out: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
    **arguments: Any,
) -> Report:
    """Write a set in parts, one task each, on the nodes of a running cluster ($RAY_ADDRESS or this machine's).

    Source and `out` have to be reachable under the same names from every node: a shared file system or an object store.
    Parts lie in `<out>.parts` until they are merged; a second run goes on with what is there.

    Args:
        name: As for `shards.writer.write_set`, like everything that is not said here.
        num_parts: How many; by default, as many as the cluster has CPUs. The set holds the same pairs in any case.
        out: Folder or object store of the whole set.
        overwrite: Whether a set that is there, made by another request, is replaced.
        say: Called with a line for each part that is done.

    Raises:
        ValueError: Ray is not installed, or as `write_set`.
        OSError: As `write_set`, or a task was lost.
    """
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError as error:
        raise ValueError("--ray needs Ray, which is not installed: pip install ray") from error
    target = out or str(SETS / name)
    _, _, asked = prepare(name, **{key: value for key, value in arguments.items() if key in REQUEST})
    there = written_before(open_work(target), asked, overwrite, arguments.get("allow_missing", 0))
    if there is not None:
        return there
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ConnectionError("no Ray cluster runs here, and RAY_ADDRESS names none: ray start --head") from error
    try:
        of = num_parts or max(1, int(ray.cluster_resources().get("CPU", 1)))
        places = [Part(number, of).place(target) for number in range(1, of + 1)]
        task = ray.remote(_write_part)
        running = {
            task.remote(
                os.getcwd(), name, dict(arguments, out=place, part=Part(number, of), overwrite=overwrite)
            ): number
            for number, place in enumerate(places, 1)
        }
        while running:
            (done, *_), _ = ray.wait(list(running))
            number = running.pop(done)
            line = ray.get(done)
            if say is not None:
                say(f"{Part(number, of)}: {line}")
    except RayTaskError as error:
        cause = error.cause
        kind = ValueError if isinstance(cause, ValueError) else OSError
        raise kind(f"a part failed: {cause}") from error
    except RayError as error:
        raise OSError(f"a part was lost: {error}; the same command goes on") from error
    finally:
        if started:
            ray.shutdown()
    report = merge_parts(target, places, overwrite, arguments.get("allow_missing", 0))
    _remove(f"{target}.parts")
    return report


def _remove(parts: str) -> None:
    if "://" in parts:
        open_filesystem(parts).rm(parts, recursive=True)
    else:
        shutil.rmtree(parts, ignore_errors=True)


def _write_part(folder: str, name: str, arguments: dict[str, Any]) -> str:
    """On a node: one part. Paths mean what they mean in the driver's folder."""
    os.chdir(folder)
    return write_set(name, **arguments).lines()[0]
