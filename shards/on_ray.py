"""The parts of a set on a Ray cluster, then merged: `pipeline shards write --ray`."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shards.location import location, walk
from shards.mds import SETS
from shards.merge import merge_parts
from shards.output import open_work
from shards.parts import Part
from shards.remote.filesystem import open_filesystem
from shards.report import Report
from shards.stopped import Stopped
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
        name: As for `shards.writer.write_set`, like everything that is not said here. Each task takes as many CPUs as
            `workers` says.
        num_parts: How many; by default as many as are there from a run before, else as the cluster writes at a time.
            The set holds the same pairs in any case.
        out: Folder or object store of the whole set.
        overwrite: Whether a set that is there, made by another request, is replaced.
        say: Called with a line for each part that is done.

    Raises:
        ValueError: Ray is not installed, or as `write_set`.
        OSError: As `write_set`, or a task was lost.
        Stopped: Ctrl-C.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--ray needs Ray, which is not installed: pip install ray") from error
    target = out or str(SETS / name)
    _, _, asked = prepare(name, **{key: value for key, value in arguments.items() if key in REQUEST})
    there = written_before(open_work(target), asked, overwrite, arguments.get("allow_missing", 0))
    if there is not None:
        _clean(target, asked)
        return there
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ConnectionError("no Ray cluster runs here, and RAY_ADDRESS names none: ray start --head") from error
    try:
        cpus, at_a_time = _shares(ray, arguments.get("workers", 1))
        of = num_parts or _left(target) or at_a_time
        places = {part: part.place(target) for part in (Part(number, of) for number in range(1, of + 1))}
        task = ray.remote(num_cpus=cpus)(_write_part)
        tasks = {}
        for part, place in places.items():
            tasks[task.remote(os.getcwd(), name, dict(arguments, out=place, part=part, overwrite=overwrite))] = part
        _wait(ray, tasks, say)
    except KeyboardInterrupt:
        raise Stopped(f"stopped: what {target}.parts holds is kept, the same command goes on from there") from None
    finally:
        if started:
            ray.shutdown()
    report = merge_parts(target, list(places.values()), overwrite, arguments.get("allow_missing", 0))
    _clean(target, asked)
    return report


def _wait(ray: Any, tasks: dict[Any, Part], say: Callable[[str], None] | None) -> None:
    """For all tasks; when one fails, the others end too, and go on in the next run."""
    from ray.exceptions import RayError, RayTaskError

    left = list(tasks)
    try:
        while left:
            (done, *_), left = ray.wait(left)
            line = ray.get(done)
            if say is not None:
                say(f"{tasks[done]}: {line}")
    except RayTaskError as error:
        cause = error.cause
        kind = ValueError if isinstance(cause, ValueError) else OSError
        raise kind(f"a part failed: {cause}") from error
    except RayError as error:
        raise OSError(f"a part was lost: {error}; the same command goes on") from error
    finally:
        for task in left:
            ray.cancel(task)


def _shares(ray: Any, workers: int) -> tuple[int, int]:
    """CPUs of a task, which no node may have as many of as it has workers, and how many such tasks the cluster runs."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cpus = min(workers, max(nodes, default=0))
    return cpus, max(1, sum(node // cpus for node in nodes) if cpus else 1)


_PLACE = re.compile(r"\.?(\d+)-of-(\d+)(\.writing)?")


def _names(target: str) -> list[str]:
    """What lies in `<target>.parts`."""
    try:
        return sorted({name.partition("/")[0] for name in walk(location(f"{target}.parts"))})
    except FileNotFoundError:
        return []


def _left(target: str) -> int | None:
    """Of how many parts a run before this one has left the most: another number would begin anew."""
    counts = Counter(int(match.group(2)) for name in _names(target) if (match := _PLACE.fullmatch(name)))
    return max(counts, key=lambda of: counts[of], default=None)


def _clean(target: str, asked: dict[str, Any]) -> None:
    """Remove the parts of a request whose whole set is there, whatever their number was."""
    parts = f"{target}.parts"
    for name in _names(target):
        match = _PLACE.fullmatch(name)
        if match and not match.group(3) and _is_part_of(f"{parts}/{name}", asked):
            if "://" in parts:
                open_filesystem(parts).rm(f"{parts}/{name}", recursive=True)
            else:
                shutil.rmtree(f"{parts}/{name}", ignore_errors=True)
    if "://" not in parts and Path(parts).is_dir() and not any(Path(parts).iterdir()):
        Path(parts).rmdir()


def _is_part_of(place: str, asked: dict[str, Any]) -> bool:
    try:
        receipt = open_work(place).existing()
    except ValueError:
        return False  # somebody else's
    if receipt is None:
        return False
    request = {key: value for key, value in receipt.request.items() if key != "part"}
    return receipt.part is not None and {"name": receipt.content["name"], "request": request} == asked


def _write_part(folder: str, name: str, arguments: dict[str, Any]) -> str:
    """On a node: one part. Paths mean what they mean in the driver's folder."""
    os.chdir(folder)
    return write_set(name, **arguments).lines()[0]
