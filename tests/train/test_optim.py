"""Parameter groups and the learning rate, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeline.train.optim import lr_factor, make_optimizer
from pipeline.training_sections import OptimizerConfig, ScheduleConfig


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2, bias=False)
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)


def test_only_matrices_are_decayed_and_frozen_parameters_are_left_out() -> None:
    model = _Model()
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.2, lr_overrides={"head.*": 1e-2}))
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is p for p in group["params"])
    }
    assert found == {
        "body.weight": (1e-3, 0.2),
        "body.bias": (1e-3, 0.0),
        "norm.weight": (1e-3, 0.0),
        "norm.bias": (1e-3, 0.0),
        "head.weight": (1e-2, 0.2),
        "logit_scale": (1e-3, 0.0),
    }
    assert all(group["peak_lr"] == group["lr"] for group in optimizer.param_groups)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'frozen\.\*' matches no parameter that trains"):
        make_optimizer(_Model(), OptimizerConfig(lr=1e-3, lr_overrides={"frozen.*": 1.0}))


def test_nothing_to_train_is_an_error() -> None:
    model = _Model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter trains"):
        make_optimizer(model, OptimizerConfig(lr=1e-3))


def test_warm_up_then_half_a_cosine() -> None:
    schedule = ScheduleConfig(epochs=1, warmup_steps=4)
    factors = [lr_factor(step, 12, schedule) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0  # the cosine begins at its top
    assert factors[8] == pytest.approx(0.5)  # half way
    assert factors[6] == pytest.approx((1 + math.sqrt(0.5)) / 2)  # a quarter of the way
    assert factors[12] == pytest.approx(0.0)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert lr_factor(0, 10, ScheduleConfig(epochs=1)) == 1.0
