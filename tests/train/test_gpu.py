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
from tests.train.tiny import write_recipe, write_zero_config

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


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_on_the_gpu_with_nccl(bf16: bool, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, schedule={"epochs": 1})
    config = write_zero_config(tmp_path, 2, bf16={"enabled": bf16})
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "train", "--config", str(config), "--recipe", str(recipe)],
        env={**os.environ, "MASTER_PORT": "29620", "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 rank(s) on cuda" in done.stdout
    info = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert (info["state"], info["device"]) == ("finished", "cuda:0")
