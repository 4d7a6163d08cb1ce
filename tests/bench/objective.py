"""The contrastive objective beside open_clip's ClipLoss, in one run: python -m tests.bench.objective [--help]

Forward and backward, float32, width 768, the same threads for both. Ours computes InfoNCE as ClipLoss does; the margin
is then compared with our own InfoNCE. A ratio below 1 means that ours is faster, smaller, or sends less.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pipeline.objective import HNClipLoss, InfoNCELoss
from tests.bench.measure import SentElements, machine, paired, peak_bytes, spread
from tests.ranks import Pool
from tests.resident import peak_resident_bytes

WIDTH = 768
HUGE = 131072
HUGE_LIMIT = 4e9


def features(num_pairs: int, seed: int = 0) -> list[Tensor]:
    """Images, captions and scale, with the geometry of dense captions: a mean cosine of the captions of 0.8."""
    generator = torch.Generator().manual_seed(seed)
    detail = torch.randn(num_pairs, WIDTH, generator=generator) / WIDTH**0.5
    topic = normalize(torch.randn(WIDTH, generator=torch.Generator().manual_seed(99)), dim=0)
    noise = torch.randn(num_pairs, WIDTH, generator=generator) / WIDTH**0.5
    image, text = normalize(detail + noise, dim=1), normalize(topic + 0.5 * detail, dim=1)
    return [tensor.requires_grad_() for tensor in (image, text, torch.tensor([50.0]))]


def step(loss: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """Forward and backward."""

    def run() -> None:
        for tensor in inputs:
            tensor.grad = None
        loss(*inputs).backward()

    return run


def one_process(num_pairs: int, repeats: int, targets: dict[str, float]) -> None:
    """Time and memory against ClipLoss, and the price of the margin."""
    from open_clip.loss import ClipLoss

    inputs = features(num_pairs)
    ours, theirs, margin = (step(loss, inputs) for loss in (InfoNCELoss(), ClipLoss(), HNClipLoss()))
    head = f"N = {num_pairs:6}"
    for clock, name in ((time.perf_counter, "time"), (time.process_time, "CPU time")):
        seconds = paired(ours, theirs, repeats, clock)
        goal = f"target {targets['time']}" if name == "time" else ""
        report(f"{head}, {name}, InfoNCE / ClipLoss", str(seconds), spread(seconds.ratios), goal)
    seconds = paired(margin, ours, repeats)
    report(f"{head}, time, HN / our InfoNCE", str(seconds), spread(seconds.ratios))
    first, second = peak_bytes(ours), peak_bytes(theirs)
    goal = f"target {targets['memory']}" if "memory" in targets else ""
    size = f"{first / 2**20:8.0f} MB {second / 2**20:8.0f} MB"
    report(f"{head}, peak extra memory, InfoNCE / ClipLoss", size, f"{first / second:.3f}", goal)


def on_rank(num_pairs: int, repeats: int) -> tuple[list[float], list[float], int, int]:
    """Seconds and sent elements of this rank, ours and theirs."""
    import torch.distributed as dist
    from open_clip.loss import ClipLoss

    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = features(num_pairs // size, seed=rank)
    clip_loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)
    ours, theirs = step(InfoNCELoss(), inputs), step(clip_loss, inputs)
    seconds = paired(ours, theirs, repeats)
    sent = []
    for run in (ours, theirs):
        with SentElements() as count:
            run()
        sent.append(count.total)
    return seconds.first, seconds.second, sent[0], sent[1]


def ranks(world_size: int, num_pairs: int, repeats: int) -> None:
    """Time and traffic against ClipLoss's local loss. The slowest rank counts."""
    pool = Pool(world_size)
    try:
        found = pool.run(on_rank, num_pairs, repeats, timeout=3600)
    finally:
        pool.close()
    first, second = ([max(times) for times in zip(*(rank[i] for rank in found), strict=True)] for i in (0, 1))
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    head = f"{world_size} ranks, N = {num_pairs}"
    times = "{:8.0f} ms {:8.0f} ms".format(*(1e3 * sorted(t)[len(t) // 2] for t in (first, second)))
    report(f"{head}, time, InfoNCE / ClipLoss", times, spread(ratios), "target 0.75")
    sent = [max(rank[i] for rank in found) for i in (2, 3)]
    report(f"{head}, elements sent", "{:11,} {:11,}".format(*sent), f"{sent[0] / sent[1]:.3f}", "target 0.55")


def huge() -> None:
    """One step on a batch whose N x N matrix would take 64 GiB, in a process of its own; its whole memory counts."""
    began = time.perf_counter()
    command = [sys.executable, "-c", f"from tests.bench.objective import huge_step; huge_step({HUGE})"]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    minutes = (time.perf_counter() - began) / 60
    size = f"{minutes:5.1f} minutes, {peak / 1e9:.2f} GB resident"
    report(f"N = {HUGE}, HN", size, "", f"target {HUGE_LIMIT / 1e9:.0f} GB: {'met' if peak < HUGE_LIMIT else 'MISSED'}")


def huge_step(num_pairs: int) -> None:
    """What the process of `huge` does; prints its largest resident memory in bytes."""
    step(HNClipLoss(), features(num_pairs))()
    print(peak_resident_bytes())


def report(what: str, values: str, ratio: str, target: str = "") -> None:
    """One line of the table."""
    print(f"{what:48} {values:>26}   {ratio:22} {target}", flush=True)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="paired runs of each comparison")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 16384], help="batch sizes in one process")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of one process")
    parser.add_argument("--huge", action="store_true", help=f"also one step at N = {HUGE}: half an hour on two cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine()}; {options.threads} threads; d = {WIDTH}, float32; median of {options.repeats} (range)")
    for num_pairs in options.sizes:
        targets = {"time": 0.55} if num_pairs <= 4096 else {"time": 0.6, "memory": 0.125}
        one_process(num_pairs, options.repeats, targets)
    for world_size in options.ranks:
        ranks(world_size, 4096, options.repeats)
    if options.huge:
        huge()


if __name__ == "__main__":
    main()
