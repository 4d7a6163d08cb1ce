"""Large batches on small memory: the cached step is the step of one large batch, dropout replayed, at every stage."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data import Batch, sample_key
from pipeline.model import DualEncoder, Features
from pipeline.objective.reference import reference_loss
from tests.objective.token_cases import Tokens, plain_token_loss
from tests.ranks import Ranks
from tests.train.tiny import MODEL

NUM_MICRO, PAIRS, SEED, STEP = 3, 4, 7, 5  # pairs per micro-batch over all ranks
LEARNING_RATE = 0.5
TOKEN_WEIGHT = 0.5
TIMEOUT_S = 400  # open_clip and DeepSpeed are imported, and collectives compiled, on the first call


def _model() -> DualEncoder:
    """Half of the patches are dropped, by the random state of the moment."""
    from pipeline.model.factory import build_from_spec

    spec = copy.deepcopy(MODEL)
    spec["model_cfg"]["vision_cfg"]["patch_dropout"] = 0.5  # type: ignore[index]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_from_spec(spec)
        # At open_clip's own 0.01 to 0.02 every caption starts as the same, with gradients far above 1.
        torch.nn.init.normal_(model.clip.text.token_embedding.weight)
        torch.nn.init.normal_(model.clip.text.positional_embedding)
    return model.train()


def _batch(number: int, rank: int, world: int) -> Batch:
    """A rank's share of a micro-batch; captions are of another length in each."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 49000, (PAIRS, 6 + number), generator=generator)
    ids[:, 0], ids[:, -1] = 49406, 49407
    ids[0, -2:] = torch.tensor([49407, 0])  # a shorter caption
    keys = number * PAIRS + torch.arange(PAIRS)
    keys[-1] = 0  # repeats the first pair of the first micro-batch
    own = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    pixels = torch.randn(PAIRS, 3, 32, 32, generator=generator)
    return Batch(key=keys[own], pixel_values=pixels[own], input_ids=ids[own], ids=[str(k) for k in keys[own].tolist()])


def _features(model: DualEncoder, number: int, rank: int, world: int) -> tuple[Features, Tensor]:
    torch.manual_seed(sample_key(f"{SEED}/{STEP}/{number}/{rank}"))
    batch = _batch(number, rank, world)
    return model(batch["pixel_values"], batch["input_ids"], tokens=True), batch["key"]


def _objective(parts: list[tuple[Features, Tensor]]) -> Tensor:
    """HN-CLIP's loss over these pairs as one batch, from its formula."""
    image, text = (torch.cat([getattr(f, name) for f, _ in parts]) for name in ("image_features", "text_features"))
    return reference_loss(image, text, parts[0][0].logit_scale, 0.5, torch.cat([key for _, key in parts]))


def _token(parts: list[tuple[Features, Tensor]]) -> Tensor:
    length = max(f.text_tokens.shape[1] for f, _ in parts)
    pad = torch.nn.functional.pad
    text = torch.cat([pad(f.text_tokens, (0, 0, 0, length - f.text_tokens.shape[1])) for f, _ in parts])
    mask = torch.cat([pad(f.text_mask, (0, length - f.text_mask.shape[1])) for f, _ in parts])
    image = torch.cat([f.image_tokens for f, _ in parts])
    return plain_token_loss(Tokens(image, text, mask, parts[0][0].logit_scale), torch.cat([key for _, key in parts]))


@cache
def _one_graph(negatives: str, scope: str | None, world: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by plain autograd through everything at once, without caches, engines or ranks."""
    model = _model()
    parts = {(k, r): _features(model, k, r, world) for k in range(NUM_MICRO) for r in range(world)}
    everything = list(parts.values())
    by_micro = [[parts[k, r] for r in range(world)] for k in range(NUM_MICRO)]
    by_rank = [[parts[k, r] for k in range(NUM_MICRO)] for r in range(world)]
    groups = {"micro": by_micro, "rank": by_rank, "global": [everything]}
    loss = sum(map(_objective, groups[negatives])) / len(groups[negatives])
    if scope is not None:
        loss = loss + TOKEN_WEIGHT * sum(map(_token, groups[scope])) / len(groups[scope])
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _recipe(negatives: str, scope: str | None, world: int) -> Any:
    from pipeline.config import parse_recipe

    values: dict[str, Any] = {
        "recipe": "by-hand",
        "data": {"set": "none"},
        "model": {"name": "none"},
        "objective": {"name": "hn", "gamma": 0.5},
        "batch": {"size": NUM_MICRO * PAIRS, "accumulate": NUM_MICRO, "negatives": negatives},
        "optimizer": {"lr": 1.0},
        "schedule": {"epochs": 1},
    }
    if scope is not None:
        values["token"] = {"weight": TOKEN_WEIGHT, "scope": scope}
    return parse_recipe(values, "by-hand")


def _engine_step(stage: int, negatives: str, scope: str | None, bf16: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss, and what one step of SGD did to the weights as the optimizer holds them, over the learning rate."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from pipeline.train.distributed import Ranks as Sharing
    from pipeline.train.further import FurtherInputs
    from pipeline.train.step import Stepper
    from pipeline.train.terms import make_terms

    rank, world = dist.get_rank(), dist.get_world_size()
    model = _model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": PAIRS // world,
        "gradient_accumulation_steps": NUM_MICRO,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        # Else ZeRO-3 would keep parameters as small as these whole.
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    sharing = Sharing(rank, world, rank, world, torch.device("cpu"))
    terms = make_terms(_recipe(negatives, scope, world), rank)
    stepper = Stepper(engine, terms, FurtherInputs(()), sharing, NUM_MICRO, SEED)
    batches = iter([_batch(k, rank, world) for k in range(NUM_MICRO)])
    losses = stepper.step(lambda: next(batches), STEP, 0)
    after = {}
    for name, parameter in engine.module.named_parameters():
        held = None if stage == 0 and not bf16 else safe_get_full_fp32_param(parameter)
        after[name] = (parameter.detach() if held is None else held).float().clone()
    assert engine.global_steps == 1
    engine.destroy()
    start = {name: p.bfloat16().float() if bf16 else p for name, p in before.items()}
    return losses["loss"], {name: (start[name] - after[name]) / LEARNING_RATE for name in after}


def _many(stages: list[int], cases: list[tuple[str, str | None]], bf16: bool) -> list[Any]:
    return [(s, c, _engine_step(s, *c, bf16)) for s in stages for c in cases]


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to entries above 1."""
    assert found.keys() >= expected.keys()
    return max(float((found[n] - g).abs().max() / g.abs().max().clamp(min=1)) for n, g in expected.items())


@pytest.mark.parametrize("world", [1, 2])
def test_the_cached_step_is_that_of_one_large_batch_at_every_stage(world: int, ranks: Ranks) -> None:
    cases: list[tuple[str, str | None]] = [("global", None), ("rank", None), ("global", "global")]
    results = ranks(world).run(_many, [0, 1, 2, 3], cases, False, timeout=TIMEOUT_S)
    for rank in results:
        for stage, case, (loss, gradients) in rank:
            value, expected = _one_graph(*case, world)
            assert loss == pytest.approx(value, rel=1e-5), (stage, case)
            assert _error(gradients, expected) < 1e-6, (stage, case)


def test_terms_of_different_reach_share_a_step(ranks: Ranks) -> None:
    """Also the accumulation that caches nothing, against the same one graph."""
    cases: list[tuple[str, str | None]] = [
        ("micro", None),
        ("micro", "micro"),
        ("micro", "global"),
        ("global", "micro"),
    ]
    for rank in ranks(2).run(_many, [2, 3], cases, False, timeout=TIMEOUT_S):
        for stage, case, (loss, gradients) in rank:
            value, expected = _one_graph(*case, 2)
            assert loss == pytest.approx(value, rel=1e-5), (stage, case)
            assert _error(gradients, expected) < 1e-6, (stage, case)


def test_bf16(ranks: Ranks) -> None:
    """To the precision of bf16 gradients; a forgotten or doubled micro-batch would be off by a third."""
    value, expected = _one_graph("global", None, 2)
    for rank in ranks(2).run(_many, [0, 1, 2, 3], [("global", None)], True, timeout=TIMEOUT_S):
        for stage, _, (loss, gradients) in rank:
            assert loss == pytest.approx(value, rel=0.02), stage
            found = torch.cat([gradients[name].flatten() for name in expected])
            wanted = torch.cat([g.flatten() for g in expected.values()])
            assert (found - wanted).norm() < 0.05 * wanted.norm(), stage


def test_the_scopes_differ() -> None:
    """Else the tests above would show nothing."""
    losses = {(n, s): _one_graph(n, s, 2)[0] for n in ("micro", "rank", "global") for s in (None, "micro", "global")}
    assert len({round(loss, 3) for loss in losses.values()}) == len(losses)
