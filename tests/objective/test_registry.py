from __future__ import annotations

import pytest

from pipeline.objective import HNClipLoss, make_objective
from pipeline.objective.margin import Margin
from pipeline.objective.registry import OBJECTIVES, parameters


def test_hn_takes_its_parameters():
    objective = make_objective("hn", gamma=0.25)
    assert isinstance(objective, HNClipLoss)
    assert objective.gamma == 0.25
    assert make_objective("hn").gamma == 0.5


def test_infonce_has_no_margin():
    assert make_objective("infonce", memory_budget=10).margin() == Margin()


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown objective: 'infoNCE'. Nearest: 'infonce'; all: infonce, hn"):
        make_objective("infoNCE")


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown parameter of the objective 'hn': 'gama'. Nearest: 'gamma'"):
        make_objective("hn", gama=0.5)
    with pytest.raises(ValueError, match="unknown parameter of the objective 'infonce': 'gamma'"):
        make_objective("infonce", gamma=0.5)
    with pytest.raises(ValueError, match=r"unknown parameter of the objective 'arm': 'm'\. It has none"):
        make_objective("arm", m=0.5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_word_builds_with_its_defaults_and_offers_no_process_group(name):
    make_objective(name)
    assert not {"group", "self", "options"} & set(parameters(name))
    with pytest.raises(ValueError, match="unknown parameter"):
        make_objective(name, group=None)


def test_the_words_of_a_recipe():
    options = ["label_smoothing", "decoupled", "equal_captions", "memory_budget"]
    gamma = ["gamma", "gamma_schedule", "gamma_start"]
    assert parameters("infonce") == options
    assert parameters("uniform") == ["m", *gamma, *options]
    for name in ("hn", "hn-frozen", "hn-centred", "hn-image"):
        assert parameters(name) == [*gamma, *options]
