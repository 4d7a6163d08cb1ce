"""What a run does about samples that cannot be read and about numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.runs import write_json
from pipeline.train.distributed import Ranks
from pipeline.train.step import NonFiniteError

_NAMED = 10  # of many ids, in one line


class BadSamples:
    """The ids of samples that could not be read and had others in their place, over all ranks and launches of a run.

    Args:
        limit: so many different ones are borne.
        ranks: all of them.
    """

    def __init__(self, limit: int, ranks: Ranks) -> None:
        self.limit = limit
        self.ranks = ranks
        self.ids: set[str] = set()

    def add(self, ids: Sequence[str]) -> str | None:
        """Count those that this rank met in a step; a warning if some are new. Collective, the same on all ranks.

        Raises:
            ValueError: there are more than the limit; names some.
        """
        if not self.ranks.max([len(ids)])[0]:
            return None
        new = {name for names in self.ranks.gather(list(ids)) for name in names} - self.ids
        self.ids |= new
        if len(self.ids) > self.limit:
            raise ValueError(
                f"{len(self.ids)} samples cannot be read, more than data.max_bad_samples={self.limit}: "
                f"{_some(self.ids)}; run `pipeline shards verify`"
            )
        if not new:
            return None
        return (
            f"{_some(new)} cannot be read and had the next sample in its place; {len(self.ids)} so far, "
            f"the run stops above {self.limit} (data.max_bad_samples)"
        )


def write_down(error: NonFiniteError, run: Path, ranks: Ranks, **where: Any) -> ValueError:
    """Leave what is known in `nonfinite.json` of the run's folder; gives the error for the user. Collective.

    Args:
        error: on every rank.
        run: the run's folder.
        ranks: all of them.
        **where: `step`, scales and norms, JSON.
    """
    path = run / "nonfinite.json"
    dump = {**where, error.what: str(error.value), "ids_by_rank": ranks.gather(error.ids)}
    if ranks.is_main:
        with suppress(OSError):  # a full disk must not hide what went wrong
            write_json(path, dump)
    return ValueError(
        f"the {error.what} is {error.value} at step {where['step']}; the batch's ids are in {path}. "
        "Look at those pairs, lower optimizer.lr, or resume from the last checkpoint"
    )


def _some(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids)[:_NAMED])
