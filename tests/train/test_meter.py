"""What the meter counts: phases that nest, collectives of whoever calls them, the objective there and back."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.data.loader import Collate
from pipeline.model import Features
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.objective import HNClipLoss, InfoNCELoss, TokenLoss
from pipeline.train.grad_cache import FeatureCache
from pipeline.train.meter import CudaClock, HostClock, Meter, Phase
from pipeline.train.terms import Terms


class Ticks(HostClock):
    """A clock that goes on by one second whenever somebody looks; `late` marks are not reached yet."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.now = 0
        self.late: set[int] = set()
        self.log = [] if log is None else log

    def mark(self) -> int:
        self.now += 1
        self.log.append("mark")
        return self.now

    def is_past(self, mark: int) -> bool:
        return mark not in self.late


def test_a_phase_counts_once_however_it_nests() -> None:
    phase = Phase(Ticks())
    with phase, phase, phase:
        pass
    assert phase.take() == 1.0
    with phase:
        pass
    with phase:
        pass
    assert phase.take() == 2.0
    assert phase.take() == 0.0
    phase.end()  # nothing has begun
    phase.begin()
    phase.begin()
    phase.end()
    phase.end()
    assert phase.take() == 1.0


def test_a_phase_ends_with_an_error() -> None:
    phase = Phase(Ticks())
    with pytest.raises(KeyError), phase:
        raise KeyError
    assert phase.take() == 1.0


def test_threads_do_not_end_each_others_phase() -> None:
    clock = Ticks()
    phase = Phase(clock)
    phase.begin()  # mark 1
    other = threading.Thread(target=lambda: (phase.begin(), phase.end()))  # marks 2 and 3
    other.start()
    other.join()
    phase.end()  # mark 4
    assert phase.take() == 1.0 + 3.0


def test_what_the_device_has_not_reached_counts_the_next_time() -> None:
    clock = Ticks()
    phase = Phase(clock)
    with phase:
        pass
    clock.late = {4}
    with phase:
        pass
    assert phase.take() == 1.0
    clock.late = set()
    assert phase.take() == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_without_being_waited_for() -> None:
    phase = Phase(CudaClock())
    with phase:
        torch.cuda._sleep(10**8)  # cycles: 30 ms at least
    with phase:
        pass
    torch.cuda.synchronize()
    assert phase.take() > 0.01


# collectives ----------------------------------------------------------------------------------------------------------


class Entries:
    """A phase that counts how often it is entered from outside."""

    def __init__(self) -> None:
        self.depth = self.count = 0

    def __enter__(self) -> None:
        self.depth += 1
        self.count += self.depth == 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


def collectives_on_rank() -> tuple[dict[str, int], list[float], bool]:
    import deepspeed

    from pipeline.objective.exchange import Exchange
    from pipeline.train.collectives import watched_collectives
    from pipeline.train.distributed import distributed

    counts = {}
    functions = dist.all_reduce, dist.barrier, dist.all_gather_object, dist.Work.wait
    with distributed() as ranks:
        entries: Any = Entries()
        rows = torch.full((2, 3), float(ranks.rank + 1))
        calls = {
            "objective": lambda: Exchange().gather(rows),
            "engine": lambda: deepspeed.comm.all_reduce(rows.clone()),
            "object": lambda: ranks.gather("anything"),  # made of several collectives
            "barrier": ranks.barrier,
            "nothing": lambda: rows.sum(),
        }
        with watched_collectives(entries):
            for name, call in calls.items():
                before = entries.count
                call()
                counts[name] = entries.count - before
            before = entries.count
            work = dist.all_reduce(rows, async_op=True)
            work.wait()
            counts["aside"] = entries.count - before
        after = entries.count
        ranks.barrier()
        deepspeed.comm.barrier()
        restored = functions == (dist.all_reduce, dist.barrier, dist.all_gather_object, dist.Work.wait)
        return counts, rows.flatten().tolist(), restored and entries.count == after


def test_every_collective_counts_once_while_it_is_watched(ranks: Any) -> None:
    for counts, values, restored in ranks(2).run(collectives_on_rank):
        assert counts == {"objective": 1, "engine": 1, "object": 1, "barrier": 1, "nothing": 0, "aside": 2}
        assert values == [3.0] * 6
        assert restored


# the objective --------------------------------------------------------------------------------------------------------


class Noting(torch.autograd.Function):
    """The last step of an encoder, whose backward pass is noted."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return features.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("encoder")
        return gradient, None


def encoded(weights: tuple[Tensor, Tensor], log: list[str], scale: Tensor) -> Features:
    image, text = (Noting.apply(nn.functional.normalize(w, dim=-1), log) for w in weights)
    tokens = [nn.functional.normalize(w[:, None] + torch.ones(1, 2, 1), dim=-1) for w in weights]
    return Features(image, text, scale, tokens[0], tokens[1], torch.ones(8, 2, dtype=torch.bool))


def gradients(terms: Terms, log: list[str]) -> list[Tensor]:
    torch.manual_seed(3)
    weights = (torch.randn(8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True))
    scale = torch.tensor([10.0], requires_grad=True)
    features = encoded(weights, log, scale)
    values = terms.values(features, torch.arange(8), "micro-batch", {})
    terms.total(values).backward()
    return [w.grad for w in (*weights, scale) if w.grad is not None]


@pytest.mark.parametrize("with_token", [False, True])
@pytest.mark.parametrize("objective", [HNClipLoss(gamma=0.5), InfoNCELoss()], ids=lambda o: type(o).__name__)
def test_the_objective_is_counted_there_and_back_and_not_the_encoders(objective: Any, with_token: bool) -> None:
    token = {"token": TokenLoss(), "token_weight": 0.5} if with_token else {}
    plain = gradients(Terms(objective, **token), [])
    log: list[str] = []
    phase = Phase(Ticks(log))
    watched = gradients(Terms(objective, phase=phase, **token), log)
    assert log == ["mark", "mark", "mark", "mark", "encoder", "encoder"]  # forward, backward, then both encoders
    assert phase.take() == 2.0
    assert len(watched) == 3
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True)), "watching changes nothing"


def test_the_objective_is_counted_over_cached_features_as_well() -> None:
    torch.manual_seed(4)
    log: list[str] = []
    parts = [Features(*(nn.functional.normalize(torch.randn(4, 3), dim=-1) for _ in range(2)), torch.tensor([9.0]))] * 2
    cache = FeatureCache(parts)
    phase = Phase(Ticks(log))
    terms = Terms(InfoNCELoss(), objective_over="step", phase=phase)
    cache.differentiate(terms.total(terms.values(cache.whole, torch.arange(8), "step", {})))
    assert log == ["mark"] * 4
    assert terms.values(cache.whole, torch.arange(8), "micro-batch", {}) == {}


# a whole meter --------------------------------------------------------------------------------------------------------


def read_on_rank(batches: list[list[dict[str, Any]]]) -> tuple[int, list[dict[str, Any]]]:
    from pipeline.train.distributed import distributed

    with distributed() as ranks:
        meter = Meter(pairs_per_step=6, ranks=ranks)
        figures = []
        for steps in (2, 1):
            for batch in batches[ranks.rank][:steps]:
                meter.count(batch)  # type: ignore[arg-type]
                meter.steps += 1
            with meter.data:
                ranks.barrier()
            figures.append(meter.read())
        return os.getpid(), figures


def test_figures_are_of_all_ranks_and_the_same_on_all(ranks: Any) -> None:
    def batch(tokens: int, cut: list[bool]) -> dict[str, Any]:
        return {"num_tokens": tokens, "cut": torch.tensor(cut)}

    batches = [
        [batch(30, [True, False, False]), batch(40, [False] * 3)],
        [batch(50, [True, True, False]), batch(60, [False] * 3)],
    ]
    (_, first), (_, second) = ranks(2).run(read_on_rank, batches)
    assert [f["tokens_per_second"] / f["pairs_per_second"] for f in first] == pytest.approx([180 / 12, 80 / 6])
    assert [f["captions_cut"] for f in first] == [3 / 12, 3 / 6]
    for mine, others in zip(first, second, strict=True):
        for name in ("captions_cut", "time_share", "memory"):
            assert mine[name] == others[name]
        assert set(mine["time_share"]) == {"data", "data_slowest", "objective", "communication"}
        assert 0 < mine["time_share"]["data"] <= mine["time_share"]["data_slowest"] <= 1
        assert mine["time_share"]["objective"] == mine["time_share"]["communication"] == 0
        assert set(mine["memory"]) == {"rss", "workers"}
        assert all(50 < rss < 100_000 for rss in mine["memory"]["rss"]), "MiB of a process that has loaded torch"
        assert len(mine["memory"]["rss"]) == len(mine["memory"]["workers"]) == 2


@pytest.mark.parametrize("context", [6, 12])
def test_a_batch_says_how_many_tokens_it_has_and_which_captions_were_cut(context: int) -> None:
    from open_clip.tokenizer import SimpleTokenizer

    captions = ["a cat", "what a cat!! it sits on a mat!", "five words in this one"]
    lengths = [len(SimpleTokenizer().encode(caption)) + 2 for caption in captions]
    assert lengths[0] < 6 < lengths[2] < lengths[1]
    spec = {"model_cfg": {"text_cfg": {}}, "context_length": context}
    samples = [{"id": c, "pixels": torch.zeros(3, 2, 2).numpy(), "caption": c, "bad": []} for c in captions]
    batch = Collate(CaptionTokenizer(spec))(samples)
    assert batch["num_tokens"] == sum(min(length, context) for length in lengths)
    assert batch["cut"].tolist() == [length > context for length in lengths]
