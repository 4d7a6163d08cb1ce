"""GOAL: terms and gradients against float64, the forward pass against its parts, the views of a pair."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

from pipeline.frameworks import make_framework
from pipeline.frameworks.goal import Goal
from pipeline.frameworks.goal.views import LocalPairs, choose, regions_of
from pipeline.model import DualEncoder, Features
from pipeline.model.last_layer import image_head, image_last_layer
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.preprocess import Preprocess
from tests.frameworks.shared import distinct_model
from tests.ranks import Ranks

PAIRS, DIM, SCALE = 4, 3, 7.0
OWN = ("crop_features", "sentence_features", "box_features", "span_features")
HAS_BOX, HAS_SPAN = (True, True, False, True), (False, True, False, False)
CAPTIONS = ["A red cat. It sleeps on a mat.", "Two dogs run!", "The sky is blue. A bird. It flies.", "A hat."]


def _goal(**options: Any) -> tuple[DualEncoder, Goal]:
    model = distinct_model()
    model.framework = make_framework("goal", options, model)
    assert isinstance(model.framework, Goal)
    return model, model.framework


def _picture(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((90 + number, 60), Image.Resampling.BICUBIC)


def _batch(model: DualEncoder, goal: Goal, regions: Sequence[Any]) -> dict[str, Any]:
    """Pixels, ids and extras of the pairs that have these regions."""
    preprocess, tokenizer = goal.preprocess, CaptionTokenizer(model.spec)
    views = goal.views(preprocess)
    pairs = [
        views.of_pair({"meta": {"regions": own}}, _picture(k), CAPTIONS[k], random.Random(k))
        for k, own in enumerate(regions)
    ]
    pixels = torch.stack([torch.from_numpy(preprocess(_picture(k))) for k in range(len(regions))])
    captions = CAPTIONS[: len(regions)]
    return {"pixel_values": pixels, "input_ids": tokenizer(captions), "extras": views.collate(pairs, tokenizer)}


# --- terms


def _rows(seed: int) -> NDArray[np.float64]:
    rows = np.random.default_rng(seed).normal(size=(PAIRS, DIM))
    normalised: NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return normalised


def _expected(own: dict[str, NDArray[np.float64]]) -> list[float]:
    """L_seg, L_patch and L_text, pair by pair."""
    crop, sentence, box, span = (own[name] for name in OWN)
    segment = 0.0
    for i in range(PAIRS):
        rows = [SCALE * float(crop[i] @ sentence[j]) for j in range(PAIRS)]
        columns = [SCALE * float(crop[j] @ sentence[i]) for j in range(PAIRS)]
        segment += sum(math.log(sum(map(math.exp, z))) - z[i] for z in (rows, columns)) / (2 * PAIRS)
    patch = [(float(box[i] @ crop[i]) - 1) ** 2 for i in range(PAIRS) if HAS_BOX[i]]
    text = [(float(span[i] @ sentence[i]) - 1) ** 2 for i in range(PAIRS) if HAS_SPAN[i]]
    return [segment, sum(patch) / len(patch), sum(text) / len(text)]


def _weighted(own: dict[str, NDArray[np.float64]]) -> float:
    segment, patch, text = _expected(own)
    return 0.5 * segment + patch + text


def _terms_on_rank(world: int) -> tuple[dict[str, float], dict[str, list[list[float]]]]:
    """The values, and the gradients of the weighted sum by this rank's features, as averaged over the ranks."""
    rank, n = dist.get_rank(), PAIRS // world
    part = slice(rank * n, (rank + 1) * n)
    own = {name: torch.tensor(_rows(k)[part], dtype=torch.float32).requires_grad_() for k, name in enumerate(OWN)}
    masks = {"has_box": torch.tensor(HAS_BOX[part]), "has_span": torch.tensor(HAS_SPAN[part])}
    _, goal = _goal()
    values = goal.terms(Features(None, None, torch.tensor([SCALE]), further=own | masks), torch.arange(PAIRS)[part])
    loss = sum(weight * values[name] for name, weight in goal.weights().items())
    gradients = torch.autograd.grad(loss, list(own.values()))  # type: ignore[arg-type]
    return {name: value.item() for name, value in values.items()}, {
        name: (gradient / world).tolist() for name, gradient in zip(own, gradients, strict=True)
    }


def test_terms_and_gradients_on_any_number_of_ranks(ranks: Ranks) -> None:
    """Values by the formula; gradients by central differences of it. One rank of two has no span at all."""
    own = {name: _rows(k) for k, name in enumerate(OWN)}
    for world in (1, 2):
        found = ranks(world).run(_terms_on_rank, world)
        for values, _ in found:
            assert [values[name] for name in ("segment", "patch", "text")] == pytest.approx(_expected(own), rel=1e-5)
        for name in OWN:
            gradient = [row for _, part in found for row in part[name]]
            np.testing.assert_allclose(gradient, _differences(own, name), atol=2e-6)


def _differences(own: dict[str, NDArray[np.float64]], name: str, step: float = 1e-5) -> NDArray[np.float64]:
    found = np.zeros((PAIRS, DIM))
    for place in np.ndindex(PAIRS, DIM):
        sides = []
        for sign in (1, -1):
            moved = own[name].copy()
            moved[place] += sign * step
            sides.append(_weighted({**own, name: moved}))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


def test_pairs_without_box_or_span_cost_nothing() -> None:
    _, goal = _goal()
    own = {name: torch.tensor(_rows(k), dtype=torch.float32).requires_grad_() for k, name in enumerate(OWN)}
    none = torch.zeros(PAIRS, dtype=torch.bool)
    features = Features(None, None, torch.tensor([SCALE]), further=own | {"has_box": none, "has_span": none})
    values = goal.terms(features, torch.arange(PAIRS))
    assert values["patch"].item() == values["text"].item() == 0
    (gradient,) = torch.autograd.grad(values["patch"], own["box_features"])
    assert not gradient.any()


# --- forward


REGION = {"caption": "it sleeps on a mat", "box": [20, 5, 70, 40], "similarity_score": 3.0}
OUTSIDE = {"caption": "not in the caption", "box": [0, 0, 10, 60]}  # the crop leaves 15 pixels out on each side


def test_the_forward_pass_is_that_of_its_parts() -> None:
    """Boxes of the shards: patches inside, tokens of the sentence, each through the tower's own head."""
    model, goal = _goal()
    batch = _batch(model, goal, [[REGION], [OUTSIDE]])
    visual: Any = model.clip.visual
    text: Any = model.clip.text
    calls: list[torch.Tensor] = []
    hooks = [
        tower.transformer.register_forward_hook(lambda _module, _inputs, output: calls.append(output))
        for tower in (text, visual)
    ]
    features = model(**batch, tokens=True)
    for hook in hooks:
        hook.remove()
    seen = {"text": calls[0], "image": calls[2]}  # captions, sentences, pictures
    plain = model.encode(batch["pixel_values"], batch["input_ids"], tokens=True)
    for name in ("image_features", "text_features", "image_tokens", "text_tokens", "text_mask", "logit_scale"):
        torch.testing.assert_close(getattr(features, name), getattr(plain, name))
    own = features.further
    # 93 x 60 to 49 x 32, of which 8 columns go on the left: the box's columns are 2.8 to 29.1, its rows 2.7 to 21.3.
    inside = [1 + 4 * row + column for row in range(3) for column in range(4)]
    assert batch["extras"]["patches"][0].nonzero().flatten().tolist() == [k - 1 for k in inside]
    mean = torch.stack([seen["image"][0, k] for k in inside]).double().mean(0).float()
    torch.testing.assert_close(own["box_features"][0], F.normalize(visual.ln_post(mean) @ visual.proj, dim=-1))
    # start, a, red, cat, ".", it, sleeps, on, a, mat, ".", end
    mean = torch.stack([seen["text"][0, k] for k in range(5, 10)]).double().mean(0).float()
    torch.testing.assert_close(own["span_features"][0], F.normalize(text.ln_final(mean) @ text.text_projection, dim=-1))
    assert own["has_box"].tolist() == [True, False]
    assert own["has_span"].tolist() == [True, False]
    crop = torch.from_numpy(goal.preprocess(_picture(0).crop((20, 5, 70, 40))))
    torch.testing.assert_close(own["crop_features"][0], model.encode_image(crop[None], normalize=True)[0])
    ids = CaptionTokenizer(model.spec)(["it sleeps on a mat"])
    torch.testing.assert_close(own["sentence_features"][0], model.encode_text(ids, normalize=True)[0])


def test_gradients_reach_both_sides_of_every_term() -> None:
    model, goal = _goal()
    batch = _batch(model, goal, [[REGION], [OUTSIDE]])
    pixels = batch["pixel_values"].requires_grad_()
    crops = batch["extras"]["crops"].requires_grad_()
    patch = goal.terms(model(**batch), torch.arange(2))["patch"]
    whole, crop = torch.autograd.grad(patch, [pixels, crops])
    assert whole[0].any()
    assert crop[0].any()
    assert not whole[1].any()  # this pair's box is outside
    assert not crop[1].any()


@pytest.mark.parametrize("copy_scale", [1.0, 2.0])
def test_a_sentence_takes_the_box_of_its_nearest_mean(copy_scale: float) -> None:
    """By a loop over boxes in float64; its crop is what Pillow cuts out of the picture."""
    model, goal = _goal(boxes="proposed", copy_scale=copy_scale)
    model.eval()
    batch = _batch(model, goal, [[REGION], [], [], []])
    assert ("pictures" in batch["extras"]) == (copy_scale > 1)
    assert batch["extras"]["proposed"].all()
    given: list[torch.Tensor] = []
    hook = model.clip.visual.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))  # type: ignore[union-attr]
    features = model(**batch)
    hook.remove()
    own = features.further
    tokens = image_last_layer(model.clip.visual, batch["pixel_values"]).tokens
    chosen = set()
    for pair in range(4):
        best, best_score = (0, 0, 0, 0), -2.0
        for left, top, right, bottom in goal.tried.tolist():
            inside = [tokens[pair, 4 * y + x].double() for y in range(top, bottom) for x in range(left, right)]
            mean = torch.stack(inside).mean(0).float()
            box = F.normalize(image_head(model.clip.visual, mean[None])[0].double(), dim=0)
            score = float(box.detach() @ own["sentence_features"][pair].detach().double())
            if score > best_score:
                best, best_score, feature = (left, top, right, bottom), score, box
        torch.testing.assert_close(own["box_features"][pair].double(), feature, atol=1e-5, rtol=0)
        chosen.add(best)
        seen = goal.preprocess.fit(_picture(pair)) if copy_scale == 1 else _larger(goal.preprocess, _picture(pair))
        left, top, right, bottom = (round(edge * seen.width / 4) for edge in best)
        resized = seen.crop((left, top, right, bottom)).resize((32, 32), Image.Resampling.BILINEAR)
        cut = np.asarray(resized).astype(np.float64).transpose(2, 0, 1)
        shown = given[1][pair].numpy() * 0.5 + 0.5  # mean and std of the tiny model are 0.5
        assert np.abs(shown - cut / 255)[:, 1:-1, 1:-1].max() < 0.05
    assert len(chosen) > 1


def _larger(preprocess: Preprocess, picture: Image.Image) -> Image.Image:
    return Preprocess(64, preprocess.mean, preprocess.std).fit(picture)


@pytest.mark.parametrize(
    ("regions", "calls"), [([[REGION]] * 4, 1), ([[], [], [], []], 2), ([[REGION], [], [], []], 2)]
)
def test_each_picture_and_text_is_encoded_once(regions: list[Any], calls: int) -> None:
    """Two pictures and two texts a pair; the two texts in calls of their own lengths."""
    model, goal = _goal()
    batch = _batch(model, goal, regions)
    rows: dict[str, list[int]] = {"image": [], "text": []}
    model.clip.visual.register_forward_hook(lambda _, inputs, __: rows["image"].append(len(inputs[0])))  # type: ignore[union-attr]
    model.clip.text.register_forward_hook(lambda _, inputs, __: rows["text"].append(len(inputs[0])))  # type: ignore[union-attr]
    model(**batch)
    assert sum(rows["image"]) == sum(rows["text"]) == 2 * len(regions)
    assert len(rows["image"]) == calls
    assert len(rows["text"]) == 2


# --- views


def test_regions_of_a_pair() -> None:
    region = {"caption": "A.", "box": [-5, 3.2, 10.1, 99], "similarity_score": 2.0}
    outside = {"caption": "B.", "box": [50, 0, 60, 10]}
    empty = {"caption": "C.", "box": [5, 5, 5, 9]}
    silent = {"caption": " ", "box": [0, 0, 9, 9]}
    shares = {"caption": "D.", "relative_box": [0.1, 0.5, 0.5, 1.0]}
    found = regions_of({"regions": [region, outside, empty, silent, shares]}, (40, 30))
    assert found == [("A.", (0, 3, 11, 30), 2.0), ("D.", (4, 15, 20, 30), None)]
    assert regions_of({}, (4, 4)) == regions_of({"regions": None}, (4, 4)) == []
    assert choose(found, "best", random.Random(0)).caption == "A."
    assert {choose(found, "random", random.Random(k)).caption for k in range(9)} == {"A.", "D."}
    assert {choose([found[1]] * 2, "best", random.Random(k)).caption for k in range(3)} == {"D."}


def test_the_same_random_numbers_give_the_same_pair() -> None:
    _, goal = _goal()
    views = pickle.loads(pickle.dumps(goal.views(goal.preprocess)))  # as a loader's process gets them
    caption = "One. Two. Three. Four."
    drawn = [
        views.of_pair({"meta": {}}, _picture(0), caption, random.Random(seed))["sentence"] for seed in [*range(20), 0]
    ]
    assert drawn[0] == drawn[-1]
    assert set(drawn) == {"One.", "Two.", "Three.", "Four."}


def test_options_that_make_no_sense() -> None:
    for wrong, why in (({"scales": [0.5, 1.5]}, "shares of a side"), ({"copy_scale": 0.5}, "copy_scale")):
        with pytest.raises(ValueError, match=why):
            make_framework("goal", wrong, distinct_model())
    with pytest.raises(ValueError, match="all weights are 0"):
        _goal(segment_weight=0, patch_weight=0, text_weight=0)
    assert isinstance(_goal()[1].views(_goal()[1].preprocess), LocalPairs)
