"""StructXLIP: terms and gradients against float64, the forward pass against its parts, and trainings with it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

from pipeline.frameworks import make_framework
from pipeline.frameworks.structxlip import StructXlip
from pipeline.frameworks.structxlip.losses import span_features
from pipeline.model import DualEncoder, Features
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.runs import Run
from tests.frameworks.shared import distinct_model, write_regions_set
from tests.ranks import Ranks
from tests.train.tiny import losses_of, steps_of, train_on_rank, write_recipe

PAIRS, CROPS, SPANS, DIM, SCALE = 4, 2, 3, 3, 5.0
SHAPES = {
    "image_features": (PAIRS, DIM),
    "edge_features": (PAIRS, DIM),
    "structure_features": (PAIRS, DIM),
    "crop_features": (PAIRS, CROPS, DIM),
    "span_features": (PAIRS, SPANS, DIM),
}
IDS = [7, 8, 9, 7]  # the last pair is the first once more
HAS_EDGES = [True, False, True, True]
HAS_CROP = [[True, True], [False, False], [True, False], [True, True]]
HAS_SPAN = [[True, True, True], [True, False, False], [False, True, False], [False, False, False]]
Own = dict[str, NDArray[np.float64]]


# --- terms


def _rows() -> Own:
    drawn = np.random.default_rng(0)
    rows = {name: drawn.normal(size=shape) for name, shape in SHAPES.items()}
    return {name: values / np.linalg.norm(values, axis=-1, keepdims=True) for name, values in rows.items()}


def _lse(values: list[float]) -> float:
    return math.log(sum(map(math.exp, values)))


def _structure(own: Own) -> float:
    there = [i for i in range(PAIRS) if HAS_EDGES[i]]
    total = 0.0
    for one, other in (("edge_features", "structure_features"), ("structure_features", "edge_features")):
        for i in there:
            seen = [j for j in there if j == i or IDS[j] != IDS[i]]
            logits = {j: SCALE * float(own[one][i] @ own[other][j]) for j in seen}
            total += (_lse(list(logits.values())) - logits[i]) / (2 * len(there))
    return total


def _consistency(own: Own) -> float:
    there = [i for i in range(PAIRS) if HAS_EDGES[i]]
    return sum(1 - float(own["image_features"][i] @ own["edge_features"][i]) for i in there) / len(there)


def _local(own: Own) -> float:
    scale = min(SCALE / 0.07, 100.0)
    losses = []
    for i in range(PAIRS):
        for c in range(SPANS):
            if not HAS_SPAN[i][c] or not any(HAS_CROP[i]):
                continue
            mine, all_of_them = [], []
            for j in range(PAIRS):
                for k in range(CROPS):
                    logit = scale * float(own["span_features"][i, c] @ own["crop_features"][j, k])
                    if HAS_CROP[j][k] and j == i:
                        mine.append(logit)
                    if HAS_CROP[j][k] and (j == i or IDS[j] != IDS[i]):
                        all_of_them.append(logit)
            losses.append(_lse(all_of_them) - _lse(mine))
    return sum(losses) / len(losses)


def _weighted(own: Own) -> float:
    return 0.5 * _structure(own) + 0.05 * _consistency(own) + 0.1 * _local(own)


def _structxlip(**options: Any) -> tuple[DualEncoder, StructXlip]:
    model = distinct_model()
    model.framework = make_framework("structxlip", options, model)
    assert isinstance(model.framework, StructXlip)
    return model, model.framework


def _terms_on_rank(world: int) -> tuple[dict[str, float], dict[str, Any], float]:
    """The values, the gradients of the weighted sum as averaged over the ranks, and that of the scale."""
    rank, n = dist.get_rank(), PAIRS // world
    part = slice(rank * n, (rank + 1) * n)
    own = {name: torch.tensor(rows[part], dtype=torch.float32).requires_grad_() for name, rows in _rows().items()}
    masks = {"has_edges": HAS_EDGES, "has_crop": HAS_CROP, "has_span": HAS_SPAN}
    further = own | {name: torch.tensor(mask[part]) for name, mask in masks.items()}
    scale = torch.tensor([SCALE], requires_grad=True)
    _, framework = _structxlip()
    features = Features(further.pop("image_features"), None, scale, further=further)
    values = framework.terms(features, torch.tensor(IDS[part]))
    weights = framework.weights()
    assert list(weights) == list(values)
    loss = torch.stack([weights[name] * value for name, value in values.items()]).sum() + 0 * scale.sum()
    *gradients, of_scale = torch.autograd.grad(loss, [*own.values(), scale])
    found = {name: (gradient / world).tolist() for name, gradient in zip(own, gradients, strict=True)}
    return {name: value.item() for name, value in values.items()}, found, of_scale.item()


def _differences(own: Own, name: str, step: float = 1e-5) -> NDArray[np.float64]:
    found = np.zeros(SHAPES[name])
    for place in np.ndindex(SHAPES[name]):
        sides = []
        for sign in (1, -1):
            moved = own[name].copy()
            moved[place] += sign * step
            sides.append(_weighted({**own, name: moved}))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


def test_terms_and_gradients_on_any_number_of_ranks(ranks: Ranks) -> None:
    """Values by the formula, gradients by central differences of it; pairs without edges, a pair twice."""
    own = _rows()
    expected = {"structure": _structure(own), "consistency": _consistency(own), "local": _local(own)}
    for world in (1, 2):
        found = ranks(world).run(_terms_on_rank, world)
        for values, _, of_scale in found:
            assert values == pytest.approx(expected, rel=2e-5)
            assert of_scale == 0, "the scale is a constant of these terms"
        for name in SHAPES:
            gradient = [row for _, part, _ in found for row in part[name]]
            np.testing.assert_allclose(gradient, _differences(own, name), atol=5e-6)


@pytest.mark.parametrize("scale", [0.5, 14.3, 100.0])
def test_pairs_without_edges_cost_nothing_at_any_scale(scale: float) -> None:
    """Their features do not matter; and where no pair has an edge, neither does any."""
    _, framework = _structxlip()
    rows = {name: torch.tensor(values, dtype=torch.float32) for name, values in _rows().items()}
    masks = {"has_crop": torch.tensor(HAS_CROP), "has_span": torch.tensor(HAS_SPAN)}
    found = []
    for other in (0.0, 1.0):
        own = {name: values.clone() for name, values in rows.items()}
        own["edge_features"][1] += other
        own["structure_features"][1] -= other
        own["crop_features"][2, 1] += other
        further = own | masks | {"has_edges": torch.tensor(HAS_EDGES)}
        features = Features(own["image_features"], None, torch.tensor([scale]), further=further)
        values = framework.terms(features, torch.tensor(IDS))
        found.append([value.item() for value in values.values()])
    assert found[0] == found[1]
    further = {name: values.clone().requires_grad_() for name, values in rows.items()}
    nothing = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    nothing["has_edges"] = torch.zeros(PAIRS, dtype=torch.bool)
    features = Features(further["image_features"], None, torch.tensor([scale]), further=further | nothing)
    values = framework.terms(features, torch.tensor(IDS))
    assert [value.item() for value in values.values()] == [0, 0, 0]
    gradients = torch.autograd.grad(sum(values.values()), list(further.values()))  # type: ignore[arg-type]
    assert not any(gradient.any() for gradient in gradients)


def test_weights_fall_by_a_cosine_between_two_shares_of_the_run() -> None:
    _, framework = _structxlip()
    found = {}
    for tenths in range(11):
        framework.set_progress(tenths / 10)
        found[tenths] = framework.weights()
    assert found[0] == found[1] == {"structure": 0.5, "consistency": 0.05, "local": 0.1}
    for tenths in range(1, 9):  # the paper's ten epochs
        cosine = (1 + math.cos(math.pi * (tenths - 1) / 7)) / 2
        expected = {"structure": 0.7 + 0.3 * cosine, "consistency": 0.5 + 0.5 * cosine, "local": 0.4 + 0.6 * cosine}
        shares = {"structure": 0.5, "consistency": 0.05, "local": 0.1}
        assert found[tenths] == pytest.approx({name: shares[name] * expected[name] for name in shares})
    assert found[9] == found[10] == pytest.approx({"structure": 0.35, "consistency": 0.025, "local": 0.04})
    _, at_once = _structxlip(decay=[0.5, 0.5])
    at_once.set_progress(0.51)
    assert at_once.weights() == pytest.approx(found[10])


# --- spans


def test_features_of_spans() -> None:
    """By a loop over spans and tokens in float64, and gradients by finite differences."""
    tokens = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    spans = torch.tensor([[[0, 2], [1, 4], [4, 5]], [[2, 5], [0, 5], [0, 0]]])
    matrix = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def head(rows: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(rows, (4,)) @ matrix

    found = span_features(head, tokens, spans)
    assert found.shape == (2, 3, 3)
    for row, column in np.ndindex(2, 3):
        start, past = spans[row, column].tolist()
        if start == past:
            continue
        own = tokens[row, start:past].detach().numpy()
        lengths = np.array([math.sqrt(sum(x * x for x in token)) for token in own])
        weights = np.exp(lengths) / np.exp(lengths).sum()
        pooled = sum(weight * token for weight, token in zip(weights, own, strict=True))
        normed = (pooled - pooled.mean()) / np.sqrt(pooled.var() + 1e-5)
        feature = normed @ matrix.numpy()
        np.testing.assert_allclose(found[row, column].detach(), feature / np.linalg.norm(feature), atol=1e-10)
    assert torch.autograd.gradcheck(lambda x: span_features(head, x, spans)[:, :2], tokens)


# --- forward


CAPTIONS = ["A red cat. It sleeps on a big mat.", "Two wooden dogs run, fast!", "Clouds float."]


def _picture(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 2, (8, 8, 1), dtype=np.uint8) * 255
    return Image.fromarray(np.repeat(noise, 3, axis=2)).resize((80 + number, 60), Image.Resampling.NEAREST)


def _batch(model: DualEncoder, framework: StructXlip) -> dict[str, Any]:
    tokenizer, views = CaptionTokenizer(model.spec), framework.views(framework.preprocess)
    pictures = [_picture(k) for k in range(2)] + [Image.new("RGB", (50, 50), (9, 9, 200))]
    pairs = [
        views.of_pair({"meta": {}}, picture, caption, random.Random(0))
        for picture, caption in zip(pictures, CAPTIONS, strict=True)
    ]
    pixels = torch.stack([torch.from_numpy(framework.preprocess(picture)) for picture in pictures])
    return {"pixel_values": pixels, "input_ids": tokenizer(CAPTIONS), "extras": views.collate(pairs, tokenizer)}


@pytest.mark.parametrize("tokens", [True, False])
def test_the_forward_pass_is_that_of_its_parts(tokens: bool) -> None:
    model, framework = _structxlip(crops=2)
    model.eval()
    batch = _batch(model, framework)
    features = model(**batch, tokens=tokens)
    plain = model.encode(batch["pixel_values"], batch["input_ids"], tokens=tokens)
    for name in ("image_features", "text_features", "image_tokens", "logit_scale"):
        torch.testing.assert_close(getattr(features, name), getattr(plain, name))
    if tokens:
        length = plain.text_mask.shape[1]
        torch.testing.assert_close(features.text_tokens[:, :length], plain.text_tokens)
        assert torch.equal(features.text_mask[:, :length], plain.text_mask)
    own = features.further
    maps = batch["extras"]["edges"]
    seen = torch.from_numpy((maps.numpy()[:, :, None].repeat(3, axis=2) / 255 - 0.5) / 0.5).float()
    alone = model.encode_image(seen.flatten(0, 1), normalize=True).unflatten(0, (3, 3))
    torch.testing.assert_close(own["edge_features"], alone[:, 0])
    torch.testing.assert_close(own["crop_features"], alone[:, 1:])
    assert own["has_edges"].tolist() == [True, True, False]
    assert own["has_crop"].tolist() == [[True, True], [True, True], [False, False]]
    filtered = ["A cat. It sleeps on a big mat.", "Two dogs run, fast!", "Clouds float."]
    ids = CaptionTokenizer(model.spec)(filtered)
    assert torch.equal(batch["extras"]["structure_ids"], ids)
    torch.testing.assert_close(own["structure_features"], model.encode_text(ids, normalize=True))
    # start, two, dogs, run, ",", fast, "!", end: windows of two words over "Two dogs run"
    assert own["has_span"].sum(1).tolist() == [5, 2, 1]
    text: Any = model.clip.text
    calls: list[torch.Tensor] = []
    hook = text.transformer.register_forward_hook(lambda _module, _inputs, output: calls.append(output))
    model.encode_text(ids)
    hook.remove()
    for number, places in enumerate(([1, 2], [2, 3])):
        words = calls[0][1, places]
        pooled = (words.norm(dim=-1).softmax(0)[:, None] * words).sum(0)
        expected = F.normalize(text.ln_final(pooled) @ text.text_projection, dim=-1)
        torch.testing.assert_close(own["span_features"][1, number], expected)


@pytest.mark.parametrize(("options", "images"), [({}, 5), ({"crops": 2}, 4), ({"local_weight": 0}, 2)])
def test_each_picture_and_text_is_encoded_once(options: dict[str, Any], images: int) -> None:
    """2 + K pictures and two texts a pair, in one call of each tower."""
    model, framework = _structxlip(**options)
    batch = _batch(model, framework)
    rows: dict[str, list[int]] = {"image": [], "text": []}
    model.clip.visual.register_forward_hook(lambda _, inputs, __: rows["image"].append(len(inputs[0])))  # type: ignore[union-attr]
    model.clip.text.register_forward_hook(lambda _, inputs, __: rows["text"].append(len(inputs[0])))  # type: ignore[union-attr]
    features = model(**batch)
    assert rows == {"image": [images * 3], "text": [2 * 3]}
    assert ("local" in framework.terms(features, torch.arange(3))) == (images > 2)


def test_gradients_reach_what_a_term_is_of() -> None:
    model, framework = _structxlip()
    batch = _batch(model, framework)
    pixels = batch["pixel_values"].requires_grad_()
    values = framework.terms(model(**batch), torch.arange(3))
    text: Any = model.clip.text
    visual: Any = model.clip.visual
    for name, of_pixels, of_text in (("structure", False, True), ("consistency", True, False), ("local", False, True)):
        found = torch.autograd.grad(
            values[name], [pixels, text.text_projection, visual.proj], retain_graph=True, allow_unused=True
        )
        reached = [gradient is not None and bool(gradient.any()) for gradient in found]
        assert reached == [of_pixels, of_text, True], name


def test_options_that_make_no_sense() -> None:
    for wrong, why in (
        ({"scales": [0.5, 1.5]}, "shares of a side"),
        ({"decay": [0.8, 0.1]}, "shares of the run"),
        ({"thresholds": [200, 100]}, "0 <= low < high"),
        ({"lexicons": ["colors"]}, "is none of colours, materials, textures"),
        ({"structure_weight": 0, "consistency_weight": 0, "local_weight": 0}, "all weights are 0"),
    ):
        with pytest.raises(ValueError, match=why):
            make_framework("structxlip", wrong, distinct_model())


# --- training


@pytest.fixture(scope="module")
def regions_set(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of StructXLIP's over the tiny set's pictures: none to three segments a pair."""

    def describe(number: int, caption: str) -> tuple[str, list[dict[str, Any]]]:
        box = {"x1": 10 + number, "y1": 5, "x2": 60 + number, "y2": 80}
        segment = {"filename": "crop.png", "caption": "a part", "bbox_coordinates": box}
        segments = [{**segment, "similarity_score": k} for k in range(number % 4)]
        return f"A red drawing, {caption} It is number {number} of them.", segments

    return write_regions_set("structxlip-json", tmp_path_factory.mktemp("regions"), tiny_set, describe)


def test_runs_on_any_ranks_and_stage(ranks: Ranks, regions_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        regions_set,
        framework={"name": "structxlip", "crops": 2, "structure_floor": 0.0},
        data={"val_split": None},
        batch={"size": 8},
        schedule={"epochs": 1},
        token={"weight": 0.5},
    )
    found = {}
    for name, world, config in (("one", 1, "zero2"), ("two", 2, "zero2"), ("parts", 2, "zero3")):
        assert ranks(world).run(train_on_rank, config, str(recipe), [f"run.name={name}"]) == [0] * world
        found[name] = losses_of(tmp_path / "runs" / name)
    assert len(found["one"]) == 4
    assert found["two"] == pytest.approx(found["one"], abs=2e-4)
    assert found["parts"] == pytest.approx(found["two"], abs=1e-5)
    for number, step in enumerate(steps_of(tmp_path / "runs" / "two")):
        fallen = min(max((number / 4 - 0.1) / 0.7, 0), 1)
        cosine = (1 + math.cos(math.pi * fallen)) / 2
        own = 0.5 * cosine * step["structure"] + 0.05 * (0.5 + 0.5 * cosine) * step["consistency"]
        own += 0.1 * (0.4 + 0.6 * cosine) * step["local"]
        assert step["loss"] == pytest.approx(step["objective"] + 0.5 * step["token"] + own, rel=1e-5)


def test_a_run_learns_its_terms_and_goes_on_bitwise(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, framework={"name": "structxlip"}, schedule={"epochs": 2})
    ranks(2).run(train_on_rank, "zero2", str(recipe), ["run.name=whole", "checkpoint.keep=9"])
    run = Run(tmp_path / "runs" / "whole")
    steps = steps_of(run.path)
    assert steps[-1]["consistency"] < steps[0]["consistency"]
    assert steps[-1]["structure"] < steps[0]["structure"]
    middle, last = run.checkpoints()
    assert (middle.step, last.step) == (4, 8)
    ranks(2).run(train_on_rank, "zero2", str(recipe), [], str(middle.path))
    newest = run.latest()
    assert newest is not None
    assert newest.path != last.path
    again = steps_of(run.path)
    assert len(again) == len(steps) == 8
    assert [step["loss"] for step in again] == [step["loss"] for step in steps]
