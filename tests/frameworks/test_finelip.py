"""FineLIP: aggregation, late interaction and hinges against loops in float64, on any number of ranks, and trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from pipeline.frameworks import finelip, make_framework
from pipeline.frameworks.finelip import Aggregation, FineLip, hinge, late_interaction
from pipeline.model import DualEncoder, Features
from pipeline.objective.exchange import Exchange
from pipeline.runs import WEIGHTS, Run
from pipeline.train.checkpoint import STATE
from tests.fixtures import tiny_clip
from tests.ranks import Ranks
from tests.train.tiny import losses_of, steps_of, train_on_rank, write_recipe

Array = NDArray[np.float64]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]  # the second and the fourth pair are the same sample


def _parts(seed: int, n: int = 8, count: int = 3, dim: int = 4) -> Tensor:
    rows = torch.randn(n, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(rows, dim=-1)


def _leaky(value: float) -> float:
    return value if value > 0 else 0.1 * value


def _score(image: Array, text: Array) -> float:
    """Of one image and one caption, token by token."""
    of_image = [max(_leaky(float(x @ y)) for y in text) for x in image]
    of_text = [max(_leaky(float(x @ y)) for x in image) for y in text]
    return sum(of_image) / len(image) + sum(of_text) / len(text)


def _expected(image: Array, text: Array, ids: list[int], margin: float, worst: bool) -> float:
    n = len(ids)
    S = [[_score(image[i], text[j]) for j in range(n)] for i in range(n)]
    total = 0.0
    for i in range(n):
        others = [j for j in range(n) if ids[j] != ids[i]]
        of_image = [max(0.0, margin + S[i][j] - S[i][i]) for j in others]
        of_caption = [max(0.0, margin + S[j][i] - S[i][i]) for j in others]
        total += max(of_image) + max(of_caption) if worst else sum(of_image) + sum(of_caption)
    return total


@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 28])
def test_hinges_of_late_interaction(worst: bool, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finelip, "_TILE_BYTES", tile_bytes)
    image, text = _parts(0), _parts(1, count=5)
    scores = late_interaction(image, text, Exchange())
    maxima = torch.einsum("ipd,jwd->ijpw", image, text).amax(3)
    assert (maxima < 0).any(), "where the leaky ReLU bends"
    found = hinge(scores, torch.tensor(IDS), 0.2, worst)
    assert float(found) == pytest.approx(_expected(image.numpy(), text.numpy(), IDS, 0.2, worst), rel=1e-12)


def _erf_gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def test_aggregation_is_a_weighted_mean_of_the_words() -> None:
    torch.manual_seed(0)
    net: Any = Aggregation(10, 3).double()
    tokens = torch.randn(2, 6, 10, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True, False, False], [False] * 6])
    norm, first, _, second = net.weigh
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    w1, b1, w2, b2, gain, shift = (
        p.detach().numpy() for p in (first.weight, first.bias, second.weight, second.bias, norm.weight, norm.bias)
    )
    assert w1.shape == (2, 10), "a fifth of the width"
    rows = tokens[0, 1:4].numpy()
    centred = rows - rows.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain + shift
    logits = _erf_gelu(normed @ w1.T + b1) @ w2.T + b2
    weights = np.exp(logits) / np.exp(logits).sum(0)
    found = net(tokens, mask)
    np.testing.assert_allclose(found[0].detach().numpy(), weights.T @ rows, rtol=1e-10)
    assert not found[1].any(), "a caption without words"
    changed = torch.where(mask[..., None], tokens, 7.0)
    assert torch.equal(net(changed, mask), found)
    torch.testing.assert_close(net(tokens[:1, 1:4]), found[:1])


def _from_tokens(net: Any, worst: bool, image: Tensor, patches: Tensor, text: Tensor) -> Tensor:
    image_parts, text_parts = (
        torch.cat([F.normalize(net(tokens), dim=-1), F.normalize(whole, dim=-1)[:, None]], 1)
        for tokens, whole in ((patches, image), (text, image.flip(0)))
    )
    return hinge(late_interaction(image_parts, text_parts, Exchange()), torch.arange(len(image)), 0.2, worst)


@pytest.mark.parametrize("worst", [False, True])
def test_gradients_by_finite_differences(worst: bool) -> None:
    torch.manual_seed(1)
    net = Aggregation(3, 2).double()
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 3), (3, 3, 3), (3, 2, 3))]
    assert torch.autograd.gradcheck(lambda *x: _from_tokens(net, worst, *x), inputs)
    names, values = zip(*net.named_parameters(), strict=True)

    def of_parameters(*parameters: Tensor) -> Tensor:
        moved = dict(zip(names, parameters, strict=True))
        return _from_tokens(lambda t: torch.func.functional_call(net, moved, t), worst, *(x.detach() for x in inputs))

    assert torch.autograd.gradcheck(of_parameters, tuple(p.detach().clone().requires_grad_() for p in values))


def _model(folder: Path, **vision: Any) -> DualEncoder:
    config = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16, **vision}
    return tiny_clip(folder, config)


def _term_on_rank(folder: str, world: int, worst: bool) -> tuple[float, list[Any], list[Any]]:
    """The value, and the gradients by the parts of this rank over the number of ranks."""
    n, rank = len(IDS) // world, dist.get_rank()
    own = slice(rank * n, (rank + 1) * n)
    parts = {"image_parts": _parts(0)[own].requires_grad_(), "text_parts": _parts(1, count=5)[own].requires_grad_()}
    own_folder = Path(folder) / f"{world}-{rank}"
    own_folder.mkdir()
    framework = make_framework("finelip", {"max_violation": worst}, _model(own_folder))
    features = Features(None, None, torch.ones(1), further=parts)
    loss = framework.terms(features, torch.tensor(IDS)[own])["hinge"]
    image, text = torch.autograd.grad(loss, list(parts.values()))
    return loss.item(), (image / world).tolist(), (text / world).tolist()


@pytest.mark.parametrize("worst", [False, True])
def test_the_term_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path, worst: bool) -> None:
    found = {world: ranks(world).run(_term_on_rank, str(tmp_path), world, worst) for world in (1, 2)}
    expected = _expected(_parts(0).numpy(), _parts(1, count=5).numpy(), IDS, 0.2, worst)
    for outcome in found.values():
        assert [value for value, *_ in outcome] == pytest.approx([expected] * len(outcome), rel=1e-12)
        for side in (1, 2):
            rows = [row for rank in outcome for row in rank[side]]
            np.testing.assert_allclose(rows, found[1][0][side], atol=1e-12)


def test_the_forward_pass(tmp_path: Path) -> None:
    model = _model(tmp_path)
    framework = make_framework("finelip", {}, model)
    assert isinstance(framework, FineLip)
    model.framework = framework
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[49406, 320, 530, 49407, 0], [49406, 320, 530, 49407, 0]])
    plain = model(pixels, ids, tokens=True)
    features = model(pixels, ids, tokens=False, extras={})
    assert features.image_tokens is None
    own = features.further
    assert own["image_parts"].shape == (2, 1 + 16 // 5, 16)
    assert own["text_parts"].shape == (2, 1 + 20 // 5, 16)
    for kind, whole in (("image_parts", plain.image_features), ("text_parts", plain.text_features)):
        torch.testing.assert_close(own[kind][:, -1], whole)
        torch.testing.assert_close(own[kind].norm(dim=-1), torch.ones(own[kind].shape[:2]))
    words = F.normalize(framework.words(plain.text_tokens[:, 1:3]), dim=-1)
    torch.testing.assert_close(own["text_parts"][:, :-1], words)  # without start, end and padding
    torch.testing.assert_close(model(pixels, ids, tokens=True, extras={}).text_tokens, plain.text_tokens)
    assert model(pixels, ids).further is None


def test_a_tower_without_features_per_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives no features per token"):
        make_framework("finelip", {}, _model(tmp_path, attentional_pool=True))


def test_runs_on_any_ranks_and_stage(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        tiny_set,
        framework={"name": "finelip", "weight": 0.1},
        schedule={"epochs": 1},
        optimizer={"lr": 1e-3, "lr_overrides": {"framework.*": 2e-3}},
    )
    found = {}
    for name, world, config in (("one", 1, "zero2"), ("two", 2, "zero2"), ("parts", 2, "zero3")):
        assert ranks(world).run(train_on_rank, config, str(recipe), [f"run.name={name}"]) == [0] * world
        found[name] = losses_of(tmp_path / "runs" / name)
    assert found["two"] == pytest.approx(found["one"], rel=1e-4)
    assert found["parts"] == pytest.approx(found["two"], rel=1e-4)
    run = Run(tmp_path / "runs" / "two")
    step = steps_of(run.path)[0]
    assert step["loss"] == pytest.approx(step["objective"] + 0.1 * step["hinge"], rel=1e-6)
    assert max(step["lr_groups"]) == pytest.approx(2 * step["lr"])
    newest = run.latest()
    assert newest is not None
    with safe_open(newest.path / STATE, "pt") as state, safe_open(newest.path / WEIGHTS, "pt") as encoders:
        ours = {key for key in state.keys() if key.startswith("weight/framework.")}  # noqa: SIM118 - not a mapping
        assert len(ours) == 12
        assert not [key for key in encoders.keys() if "framework" in key]  # noqa: SIM118
