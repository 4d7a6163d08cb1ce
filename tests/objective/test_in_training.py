"""The objective under DDP and under a real DeepSpeed engine updates a model as one process would."""

from __future__ import annotations

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from pipeline.objective import HNClipLoss
from pipeline.objective.reference import reference_loss

NUM_PAIRS = 16
LEARNING_RATE = 0.05


class TwoTowers(nn.Module):
    """Two linear encoders and a scale: the least that a contrastive model can be."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.image, self.text = nn.Linear(12, 8), nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.tensor([3.0]))  # DeepSpeed refuses parameters without a dimension

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.image(pixels), dim=1), normalize(self.text(tokens), dim=1), self.logit_scale.exp()


def pairs(rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of the batch."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(NUM_PAIRS, 12, generator=generator)
    tokens = pixels[:, :10] + torch.randn(NUM_PAIRS, 10, generator=generator)
    return pixels.chunk(world_size)[rank], tokens.chunk(world_size)[rank]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def one_process() -> TwoTowers:
    """The model after the backward pass of the materialised loss over the whole batch."""
    model = TwoTowers()
    reference_loss(*model(*pairs())).backward()
    return model


def ddp_gradients() -> dict[str, Tensor]:
    model = DistributedDataParallel(TwoTowers())
    HNClipLoss()(*model(*pairs(dist.get_rank(), dist.get_world_size()))).backward()
    return gradients(model.module)


def test_ddp_has_the_gradients_of_one_process(ranks):
    expected = gradients(one_process())
    for found in ranks(2).run(ddp_gradients):
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-6), name


def zero_step(stage: int) -> dict[str, Tensor]:
    """Weights after one step of plain SGD in a DeepSpeed engine."""
    model = TwoTowers()
    config = {
        "train_micro_batch_size_per_gpu": NUM_PAIRS // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(HNClipLoss()(*engine(*pairs(dist.get_rank(), dist.get_world_size()))))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_takes_the_step_of_one_process(ranks, stage):
    model = one_process()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    # The first engine on a machine compiles DeepSpeed's collectives for CPUs, which takes more than a minute.
    for found in ranks(2).run(zero_step, stage, timeout=400):
        for name, weight in model.named_parameters():
            assert (found[name] - weight).abs().max() < 1e-6, name
            assert not torch.equal(found[name], TwoTowers().get_parameter(name)), f"{name} did not move"
