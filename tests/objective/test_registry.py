from __future__ import annotations

import pytest

from pipeline.objective import HNClipLoss, make_objective


def test_hn_takes_its_parameters():
    objective = make_objective("hn", gamma=0.25)
    assert isinstance(objective, HNClipLoss)
    assert objective.gamma == 0.25
    assert make_objective("hn").gamma == 0.5


def test_infonce_has_no_margin():
    assert make_objective("infonce", memory_budget=10).gamma == 0.0


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown objective: 'infoNCE'. Nearest: 'infonce'; all: infonce, hn"):
        make_objective("infoNCE")


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown parameter of the objective 'hn': 'gama'. Nearest: 'gamma'"):
        make_objective("hn", gama=0.5)
    with pytest.raises(ValueError, match="unknown parameter of the objective 'infonce': 'gamma'"):
        make_objective("infonce", gamma=0.5)
