"""What the token term costs a whole training step of a small ViT: python -m tests.bench.token [--help]

Forward and backward of both towers with the objective alone, with our TokenLoss, and with the plain formula that
materialises every similarity; B = 16, 224 px (196 patches), 248 tokens, float32, the same threads, in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import ModelConfig
from pipeline.model import DualEncoder, build_model
from pipeline.objective import HNClipLoss, TokenLoss
from tests.bench.measure import machine, paired, peak_bytes, spread

PAIRS, TOKENS = 16, 248
TARGET = 1.1
MODEL = {
    "model_cfg": {
        "embed_dim": 256,
        "vision_cfg": {"image_size": 224, "patch_size": 16, "width": 192, "layers": 12, "head_width": 64},
        "text_cfg": {"context_length": TOKENS, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 6},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}

TokenTerm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(patches: Tensor, words: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """The formula as it stands: all similarities [B, B, P, L] at once."""
    similarity = torch.einsum("ipd,jwd->ijpw", patches, words)
    i2t = similarity.masked_fill(~mask[None, :, None, :], -torch.inf).amax(3).mean(2)
    t2i = (similarity.amax(2) * mask[None]).sum(2) / mask.sum(1)[None]
    labels = torch.arange(len(patches))
    return 0.5 * (F.cross_entropy(scale * i2t, labels) + F.cross_entropy(scale * t2i.T, labels))


def small_vit() -> DualEncoder:
    """A ViT-Ti/16 and a text transformer of 6 layers, random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small-vit.json")
        path.write_text(json.dumps(MODEL))
        return build_model(ModelConfig(name=str(path))).train()


def step(model: DualEncoder, pixels: Tensor, ids: Tensor, token: TokenTerm | None) -> Callable[[], object]:
    """Forward and backward of a whole step."""
    objective = HNClipLoss()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        found = model(pixels, ids, tokens=token is not None)
        loss = objective(found.image_features, found.text_features, found.logit_scale)
        if token is not None:
            loss = loss + token(found.image_tokens, found.text_tokens, found.text_mask, found.logit_scale)
        loss.backward()

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="paired runs")
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    model = small_vit()
    pixels = torch.randn(PAIRS, 3, 224, 224)
    ids = torch.randint(1000, 40000, (PAIRS, TOKENS))
    ids[:, 0], ids[:, -1] = 49406, 49407  # start and end
    without, ours, formula = (step(model, pixels, ids, term) for term in (None, TokenLoss(), plain))
    print(machine())
    for name, run, goal in (("ours", ours, f"target {TARGET}"), ("plain formula", formula, "")):
        for clock, what in ((time.perf_counter, "time"), (time.process_time, "CPU time")):
            seconds = paired(run, without, repeats, clock)
            print(f"step with L_tok, {name:13} / without, {what:8} {seconds}  ratio {spread(seconds.ratios)}  {goal}")
    print(f"peak extra memory: ours {peak_bytes(ours) / 1e6:.0f} MB, plain {peak_bytes(formula) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
