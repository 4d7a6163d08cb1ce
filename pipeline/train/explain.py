"""Errors of the libraries below, said in one line: the cause, and what to do next."""

from __future__ import annotations

import os
import re

_IN_A_TRACEBACK = re.compile(r"^[A-Za-z_][\w.]*: ", re.MULTILINE)
_RENDEZVOUS = re.compile(
    r"client socket has (failed|timed out)|waiting for clients|Gloo connectFullMesh failed|failed to connect to any"
)


def one_line(text: str) -> str:
    """What an error says; of a traceback that a loader process has sent, what its exception says."""
    if "Traceback (most recent call last)" in text:
        text = text[text.rindex('\n  File "') :] if '\n  File "' in text else text
        found = _IN_A_TRACEBACK.search(text)
        text = text[found.end() :] if found else text.strip().splitlines()[-1]
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return text


def explained(error: RuntimeError) -> str | None:
    """One line for a RuntimeError that a user can do something about: of the rendezvous, the loader or streaming.

    None is another one: a bug, or a rank that is gone.
    """
    said = str(error)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in said or "address already in use" in said:
        return (
            f"the ranks cannot meet at {address}, where another program listens: end it if it is an earlier run, or "
            "take another port (deepspeed --master_port, or MASTER_PORT)"
        )
    if _RENDEZVOUS.search(said):
        return (
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} has not met the others at {address} "
            f"({said.splitlines()[0].rstrip('.')}): does every node run, with the same MASTER_ADDR and MASTER_PORT, "
            "and does a firewall let it through?"
        )
    cause = one_line(said).rstrip(".")
    if "DataLoader worker" in said and ("killed by signal" in said or "exited unexpectedly" in said):
        return f"{cause}: too little memory is the usual reason; lower data.workers or batch.size"
    step = next((step for sign, step in _STREAMING.items() if sign in cause), None)
    return f"{cause}: {step}" if step else None


_STREAMING = {  # what mosaicml-streaming says: what to do
    "Check if the shard file exists": "run `pipeline shards verify`, write the set again if a shard is gone",
    "Stream contains no samples": "write the set again, or name another split (data.train_split)",
    "Background thread failed": "its own error is above; run `pipeline shards verify`",
    "shared memory prefix": "start again; give every rank of a machine the same data.set",
    "shared memory registered does not match": "start again; give every rank of a machine the same data.set",
    "Failed to download index.json": "is data.set the address of a set of shards?",
}
