"""Time inside collectives: whoever calls them, the objective, DeepSpeed's engine, the loader or the loop.

DeepSpeed has a log of its own collectives, which synchronises the device at each of them and so slows down what it
measures, and which knows nothing of ours. Here the functions of `torch.distributed` and the methods of DeepSpeed's
backend are wrapped for as long as a run trains; a collective that calls another counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.comm import comm

# Those that torch and DeepSpeed's backend have under the same name, and each one's own.
_COLLECTIVES = (
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "inference_all_reduce",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


@contextmanager
def watched_collectives(phase: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, every collective of this process runs inside `phase`, and so does waiting for one that runs aside."""
    with ExitStack() as undo:
        for owner in (dist, comm.cdb):
            for name in _COLLECTIVES:
                if hasattr(owner, name):
                    _wrap(owner, name, phase, undo)
        _wrap(dist.Work, "wait", phase, undo)
        yield


def _wrap(owner: Any, name: str, phase: AbstractContextManager[Any], undo: ExitStack) -> None:
    original = getattr(owner, name)
    was_own = name in vars(owner)  # else it comes from the class, and taking ours away brings it back
    setattr(owner, name, _inside(phase, original))
    undo.callback(setattr, owner, name, original) if was_own else undo.callback(delattr, owner, name)


def _inside(phase: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with phase:
            return function(*args, **kwargs)

    return timed
