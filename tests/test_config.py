"""Recipes: what ships is valid, overrides and `extends` do what they say, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import DEFAULT_RECIPE, Recipe, find_config, load_recipe, parse_recipe

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml"))


def write(path: Path, **sections: object) -> str:
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_valid_and_survives_its_own_yaml(name):
    recipe = load_recipe(name)
    assert recipe.recipe == name
    assert parse_recipe(yaml.safe_load(recipe.to_yaml()), "again") == recipe


def test_the_yaml_spells_every_default_out():
    values = yaml.safe_load(load_recipe(DEFAULT_RECIPE).to_yaml())
    assert set(values) == set(Recipe.model_fields)
    assert values["optimizer"]["betas"] == [0.9, 0.999]
    assert values["evaluate"] == {"every_epochs": 1, "batch_size": 64}


def test_what_ships_means_what_its_comments_say():
    align, infonce, hn, default = (load_recipe(name) for name in ("align", "infonce", "hn", "default"))
    assert (default.objective.name, default.objective.params()) == ("hn", {"gamma": 0.5})
    assert default.model.init is None
    assert hn.model.init == infonce.model.init == "align"
    assert hn.model_copy(update={"objective": infonce.objective, "recipe": "infonce"}) == infonce  # equal budget, seed
    assert (align.objective.name, align.objective.params()) == ("infonce", {})


def test_dotted_overrides_replace_single_values():
    overrides = ["data.workers=3", "optimizer.lr=2e-3", "objective.gamma=0.25", "data.val_split=null", "run.name=a/b"]
    recipe, plain = load_recipe("hn", overrides), load_recipe("hn")
    assert (recipe.data.workers, recipe.data.val_split, recipe.run.name) == (3, None, "a/b")
    assert recipe.optimizer.lr == 0.002
    assert recipe.objective.params() == {"gamma": 0.25}
    assert recipe.optimizer.lr_overrides == plain.optimizer.lr_overrides
    assert recipe.schedule == plain.schedule


def test_a_word_stands_for_a_section_with_that_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: hn\nobjective: infonce\nframework: goal\nadapters: lora\n")
    found = load_recipe(str(file))
    assert (found.objective.name, found.objective.params()) == ("infonce", {}), "hn's gamma is not inherited"
    assert (found.framework.name, found.adapters.name, found.adapters.r) == ("goal", "lora", 16)
    words = ["objective=hn", "objective.gamma=0.25", "framework.patch_weight=0.1", "framework=goal", "adapters.r=4"]
    found = load_recipe("infonce", [*words, "adapters=dora"])
    assert found.objective.params() == {"gamma": 0.25}
    assert (found.framework.name, found.framework.params()) == ("goal", {"patch_weight": 0.1})
    assert (found.adapters.name, found.adapters.r) == ("dora", 4)
    assert load_recipe(str(file), ["framework=plain"]).framework.params() == {}
    with pytest.raises(ValueError, match="framework 'plain' has no options"):
        load_recipe("hn", ["framework.patch_weight=0.1"])


def test_a_list_override_replaces_the_list():
    assert load_recipe("align", ["model.trainable=[logit_scale]"]).model.trainable == ["logit_scale"]


def test_the_last_of_two_overrides_wins():
    assert load_recipe("align", ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dta.workers=1", r"unknown key 'dta'; did you mean 'data'\?"),
        ("data.wrkers=1", r"unknown key 'data.wrkers'; did you mean 'workers'\?"),
        ("objective.gama=1", "'gama'.*'gamma'"),
        ("objective.name=hm", "'hm'.*'hn'"),
        ("data.workers=two", r"'data.workers': .*integer"),
        ("data.workers=-1", r"'data.workers': .*greater than or equal to 0"),
        ("batch.size=0", r"'batch.size': .*greater than 0"),
        ("batch=3", r"'batch': .*"),
        ("optimizer.lr=nan", r"'optimizer.lr'"),
        ("objective.gamma=large", r"'objective': .*wrong kind"),
        ("model.trainable=[a,", r"recipe 'default': no YAML"),
        ("run.seed", r"--set takes key=value, not 'run.seed'"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_key_and_the_nearest(override, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_recipe(DEFAULT_RECIPE, [override])
    assert len(str(raised.value).splitlines()) == 1


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ValueError, match=r"data\.wrkers.*schedule\.epoch\b"):
        load_recipe(DEFAULT_RECIPE, ["data.wrkers=1", "schedule.epoch=3"])


def test_unknown_keys_of_a_file_are_named(tmp_path):
    path = write(tmp_path / "mine.yaml", extends="align", optimiser={"lr": 1})
    with pytest.raises(ValueError, match=r"unknown key 'optimiser'; did you mean 'optimizer'\?"):
        load_recipe(path)
    path = write(tmp_path / "mine.yaml", extends="align", schedule={"warmup": 1})
    with pytest.raises(ValueError, match=r"unknown key 'schedule.warmup'; did you mean 'warmup_steps'\?"):
        load_recipe(path)


def test_missing_sections_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"'model' is required.*'data\.set' is required|'data\.set' is required.*'model'"
    ):
        load_recipe(write(tmp_path / "mine.yaml", data={"workers": 1}))


def test_a_missing_recipe_names_the_nearest_and_all():
    with pytest.raises(FileNotFoundError, match=r"did you mean 'align'\?") as raised:
        load_recipe("algin")
    assert all(name in str(raised.value) for name in SHIPPED)
    with pytest.raises(FileNotFoundError, match=r"configs/recipes\. There are: align"):
        load_recipe("zzzz")


@pytest.mark.parametrize("name", ["zero2", "zero2.json", "zero0"])
def test_deepspeed_configs_are_found_by_name(name):
    assert find_config(name, "", ".json") == ROOT / "configs" / f"{name.removesuffix('.json')}.json"


def test_a_path_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero2.json").write_text("{}")
    assert find_config("zero2.json", "", ".json").resolve() == tmp_path / "zero2.json"


# extends -------------------------------------------------------------------------------------------------------------


def test_a_users_recipe_extends_a_shipped_one_and_one_beside_it(tmp_path):
    write(tmp_path / "base.yaml", extends="hn", schedule={"epochs": 7}, run={"seed": 1})
    recipe = load_recipe(write(tmp_path / "mine.yaml", extends="base", run={"log_every": 2}))
    shipped = load_recipe("hn")
    assert recipe.recipe == "mine"
    assert (recipe.schedule.epochs, recipe.schedule.warmup_steps) == (7, shipped.schedule.warmup_steps)
    assert (recipe.run.seed, recipe.run.log_every) == (1, 2)
    assert (recipe.objective, recipe.model, recipe.data) == (shipped.objective, shipped.model, shipped.data)


def test_one_beside_it_comes_before_a_shipped_one(tmp_path):
    write(tmp_path / "align.yaml", extends="infonce", run={"seed": 5})
    assert load_recipe(write(tmp_path / "mine.yaml", extends="align")).run.seed == 5


def test_another_objective_does_not_inherit_parameters(tmp_path):
    path = write(tmp_path / "mine.yaml", extends="hn", objective={"name": "infonce"})
    assert load_recipe(path).objective.params() == {}
    assert load_recipe("hn", ["objective.name=infonce"]).objective.params() == {}


def test_the_same_objective_does(tmp_path):
    shipped = load_recipe("hn").objective.params()
    for objective in ({"memory_budget": 1 << 20}, {"name": "hn", "memory_budget": 1 << 20}):
        recipe = load_recipe(write(tmp_path / "mine.yaml", extends="hn", objective=objective))
        assert recipe.objective.params() == {**shipped, "memory_budget": 1 << 20}


@pytest.mark.parametrize("spelling", ["b", "../{folder}/b"])
def test_a_cycle_is_an_error_that_names_it(tmp_path, spelling):
    path = write(tmp_path / "a.yaml", extends=spelling.format(folder=tmp_path.name))
    write(tmp_path / "b.yaml", extends="a")
    with pytest.raises(ValueError, match=r"extends itself through a -> b"):
        load_recipe(path)


def test_a_parent_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'aling'.*did you mean 'align'\?"):
        load_recipe(write(tmp_path / "mine.yaml", extends="aling"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data: [1,\n b: {", "no YAML: .*mine.yaml, line 3"),
        (b"data:\n\tset: x", "no YAML: .*mine.yaml, line 2"),
        (b"- a\n- b", "not a mapping of sections"),
        (b"3", "mine.yaml cannot be read"),
        (b"data: \xe9", "mine.yaml cannot be read"),
        (b"extends: align\nrun: {name: '${nope}'}", "'nope' not found"),
        (b"extends: align\ndata:", "'data': "),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_recipe(str(path))
    assert len(str(raised.value).splitlines()) == 1
