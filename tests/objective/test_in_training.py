"""The objective on a real open_clip model: bare, under DDP and in a real DeepSpeed engine, it trains as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.objective import HNClipLoss
from pipeline.objective.reference import reference_loss

NUM_PAIRS = 24
NUM_STEPS = 20
LEARNING_RATE = 0.5
# open_clip takes 6 CPU seconds to import on every rank, and the first DeepSpeed engine on a machine compiles its
# collectives for CPUs, which takes more than a minute.
TIMEOUT_S = 400


def tiny_clip() -> nn.Module:
    """An open_clip CLIP of 21 thousand parameters, whose image stem and token embedding are frozen."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIP(
            embed_dim=16,
            vision_cfg=CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16),
            text_cfg=CLIPTextCfg(context_length=6, vocab_size=50, width=32, heads=2, layers=1),
            nonscalar_logit_scale=True,  # DeepSpeed refuses parameters without a dimension
        )
        # At open_clip's 0.02 every caption starts as the same, with gradients of the positions far above 1.
        nn.init.normal_(model.token_embedding.weight)
        nn.init.normal_(model.positional_embedding)
    for part in (model.visual.conv1, model.token_embedding):
        part.requires_grad_(False)
    return model


def pairs(step: int = 0, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(NUM_PAIRS, 3, 16, 16, generator=generator)
    tokens = torch.randint(1, 49, (NUM_PAIRS, 6), generator=generator)
    tokens[:, 5] = 49  # end of text: the largest id, where open_clip pools
    return pixels.chunk(world_size)[rank], tokens.chunk(world_size)[rank]


def own_pairs(step: int = 0) -> tuple[Tensor, Tensor]:
    return pairs(step, dist.get_rank(), dist.get_world_size())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_process() -> dict[str, Tensor]:
    """Gradients of the materialised float64 loss over the whole batch."""
    model = tiny_clip()
    reference_loss(*model(*pairs())).backward()
    return gradients_of(model)


def bare() -> dict[str, Tensor]:
    """Gradients of the loss without a wrapper, averaged over the ranks by hand."""
    model = tiny_clip()
    HNClipLoss()(*model(*own_pairs())).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return gradients_of(model)


def ddp() -> dict[str, Tensor]:
    model = DistributedDataParallel(tiny_clip())
    HNClipLoss()(*model(*own_pairs())).backward()
    return gradients_of(model.module)


def make_engine(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": NUM_PAIRS // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zero(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients in an engine, and weights after a step of plain SGD."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_grad

    model = tiny_clip()
    engine = make_engine(stage, model, torch.optim.SGD(trained(model), lr=LEARNING_RATE))
    engine.backward(HNClipLoss()(*engine(*own_pairs())))
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    gradients = {name: safe_get_full_grad(p).detach().clone() for name, p in named}
    engine.step()
    with zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return gradients, weights


def everything() -> dict[str, Any]:
    """All that a world of ranks is asked for, in one go: starting a pool costs more than the work."""
    return {"bare": bare(), "ddp": ddp(), "zero": [zero(stage) for stage in range(4)]}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """And where; relative to the largest entry of tensors that exceed 1."""
    assert found.keys() == expected.keys()
    return max(
        (float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1)), name)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_and_weights_are_those_of_one_process(ranks, world_size):
    expected, before = one_process(), dict(tiny_clip().named_parameters())
    assert len(expected) == len(before) - 2  # the frozen part has none
    after = {name: w.detach() - LEARNING_RATE * expected.get(name, torch.tensor(0.0)) for name, w in before.items()}
    for found in ranks(world_size).run(everything, timeout=TIMEOUT_S):
        assert largest_difference(found["bare"], expected) < (1e-6,)
        assert largest_difference(found["ddp"], expected) < (1e-6,)
        for stage, (gradients, weights) in enumerate(found["zero"]):
            assert largest_difference(gradients, expected) < (1e-6,), f"ZeRO {stage}"
            assert largest_difference(weights, after) < (1e-6,), f"ZeRO {stage}"
            moved = {name for name, weight in before.items() if not torch.equal(weights[name], weight)}
            assert moved == expected.keys(), f"ZeRO {stage}"


def adamw_losses(stage: int) -> list[float]:
    model = tiny_clip()
    engine = make_engine(stage, model, torch.optim.AdamW(trained(model), lr=1e-2))
    losses = []
    for step in range(NUM_STEPS):
        loss = HNClipLoss()(*engine(*own_pairs(step % 2)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return losses


def all_adamw_losses() -> list[list[float]]:
    return [adamw_losses(stage) for stage in range(4)]


def test_20_steps_of_adamw_have_the_losses_of_one_process(ranks):
    """Losses, not weights: AdamW turns the rounding noise of the key biases, which have no gradient, into steps."""
    model = tiny_clip()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    expected = []
    for step in range(NUM_STEPS):
        loss = reference_loss(*model(*pairs(step % 2)))
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert expected[-1] < 0.8 * expected[0]
    for rank in ranks(2).run(all_adamw_losses, timeout=TIMEOUT_S):
        for stage, losses in enumerate(rank):
            assert losses == pytest.approx(expected, rel=1e-4), f"ZeRO {stage}"
