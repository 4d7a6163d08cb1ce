"""What only a GPU can show: nccl, CUDA kernels, bf16. Skipped without one; `make test-gpu` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pipeline.objective import HNClipLoss
from pipeline.runs import Run
from tests.train.tiny import losses_of, write_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_on_a_gpu_is_the_loss_on_the_cpu(dtype: torch.dtype) -> None:
    """fp32 logits on both: the same features give the same value and gradients, to fp32 of a scale of 100."""
    torch.manual_seed(0)
    features = [F.normalize(torch.randn(256, 64), dim=1).to(dtype) for _ in range(2)]
    results = []
    for device in ("cpu", "cuda"):
        image, text = (f.to(device).float().requires_grad_() for f in features)
        loss = HNClipLoss(gamma=0.5)(image, text, torch.tensor(100.0, device=device))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert image.grad is not None
        assert text.grad is not None
        results.append((loss.detach().cpu(), image.grad.cpu(), text.grad.cpu()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("config", ["zero2", "zero2-bf16", "zero2-fp16", "zero2-offload"])
def test_a_run_on_the_gpu_with_nccl_stops_and_goes_on(config: str, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, checkpoint={"every_steps": 3, "keep": 9})
    first = _train(config, recipe)
    assert "1 rank(s) on cuda" in first
    run = Run(tmp_path / "runs" / "tiny")
    assert (run.info["state"], run.info["device"]) == ("finished", "cuda:0")
    losses = losses_of(run.path)
    third = next(c for c in run.checkpoints() if c.step == 3)
    scaler = json.loads((third.path / "manifest.json").read_text())["scaler"]
    assert (scaler.get("cur_scale", 0) > 1) == ("fp16" in config)
    assert f"going on from {third.path}" in _train(config, None, "--resume", str(third.path))
    assert losses_of(run.path) == pytest.approx(losses, rel=1e-3)  # kernels need not add in the same order


def _train(config: str, recipe: Path | None, *more: str) -> str:
    command = [sys.executable, "-m", "pipeline.cli", "train", "--config", config, *more]
    command += ["--recipe", str(recipe)] if recipe else []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
