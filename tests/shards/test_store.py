"""Finding wanted files in folders and archives."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.names import NotFound, natural_key, split_path
from shards.store import open_store
from tests.shards.layouts import as_container, write_tar, write_tree

KINDS = ["folder", "tar", "tar.gz", "zip"]


def read(path: Path, *wanted: str) -> dict[str, bytes | NotFound]:
    answers = list(open_store(path).read_wanted(wanted))
    assert len(answers) == len({name for name, _ in answers}), "a name was answered twice"
    return dict(answers)


@pytest.mark.parametrize("kind", KINDS)
def test_names_match_by_path_suffix_or_unique_basename(kind: str, tmp_path: Path) -> None:
    files = {"deep/photos/sa_1.jpg": b"one", "deep/photos/sa_2.jpg": b"two", "deep/other/sa_3.jpg": b"three"}
    path = as_container(kind, tmp_path, files)
    wanted = ["deep/photos/sa_1.jpg", "../x/photos/sa_2.jpg", "C:\\theirs\\sa_3.jpg", "sa_1.jpg", "sa_4.jpg"]
    found = read(path, *wanted)
    assert [found[name] for name in wanted[:4]] == [b"one", b"two", b"three", b"one"]
    missing = found["sa_4.jpg"]
    assert isinstance(missing, NotFound)
    assert "sa_1.jpg" in missing.reason, "the reason shows what is there"


@pytest.mark.parametrize("kind", KINDS)
def test_the_better_match_wins_whatever_the_order(kind: str, tmp_path: Path) -> None:
    files = {"docci/a_thumbs/x.jpg": b"thumb", "docci/images/x.jpg": b"full", "docci/z_thumbs/x.jpg": b"thumb"}
    assert read(as_container(kind, tmp_path, files), "images/x.jpg") == {"images/x.jpg": b"full"}


@pytest.mark.parametrize("kind", KINDS)
def test_ambiguous_basenames_are_not_guessed(kind: str, tmp_path: Path) -> None:
    path = as_container(kind, tmp_path, {"a/x.jpg": b"a", "b/x.jpg": b"b", "c/y.jpg": b"y"})
    found = read(path, "theirs/x.jpg", "theirs/y.jpg")
    assert isinstance(found["theirs/x.jpg"], NotFound)
    assert "a/x.jpg or b/x.jpg" in found["theirs/x.jpg"].reason
    assert found["theirs/y.jpg"] == b"y"


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_stream_stops_when_a_served_name_turns_out_ambiguous(kind: str, tmp_path: Path) -> None:
    path = as_container(kind, tmp_path, {"a/x.jpg": b"a", "b/x.jpg": b"b"})
    with pytest.raises(ValueError, match=r"holds both a/x\.jpg and b/x\.jpg"):
        read(path, "x.jpg")


def test_appended_copy_in_a_tar_is_no_ambiguity(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "twice.tar", [("a/x.jpg", b"1"), ("a/x.jpg", b"1")])
    assert read(path, "x.jpg", "theirs/x.jpg") == {"x.jpg": b"1", "theirs/x.jpg": b"1"}


@pytest.mark.parametrize("kind", KINDS)
def test_junk_of_macos_is_passed_over(kind: str, tmp_path: Path) -> None:
    files = {"__MACOSX/p/x.jpg": b"no", "__MACOSX/p/._x.jpg": b"no", "p/._x.jpg": b"no", "p/x.jpg": b"yes"}
    store = open_store(as_container(kind, tmp_path, {**files, "p/.DS_Store": b"no"}))
    assert dict(store.read_wanted(["x.jpg"])) == {"x.jpg": b"yes"}
    assert [data for _, data in store.iter_files("*")] == [b"yes"]


@pytest.mark.parametrize("kind", KINDS)
def test_iter_files_by_pattern(kind: str, tmp_path: Path) -> None:
    files = {
        "d/annotations/2.json": b"2",
        "d/annotations/10.json": b"10",
        "d/annotations/n.txt": b"n",
        "d/s.json": b"s",
    }
    store = open_store(as_container(kind, tmp_path, files))
    got = list(store.iter_files("annotations/*.json", "s.json"))
    assert sorted(data for _, data in got) == [b"10", b"2", b"s"]
    if kind == "folder":
        assert [data for _, data in got] == [b"s", b"2", b"10"], "numbers sort by value"


def test_absolute_and_parent_paths_are_read_from_a_folder(tmp_path: Path) -> None:
    write_tree(tmp_path, {"pictures/x.jpg": b"x", "lists/a.txt": b""})
    absolute = str(tmp_path / "pictures" / "x.jpg")
    found = read(tmp_path / "lists", "../pictures/x.jpg", absolute)
    assert found == {"../pictures/x.jpg": b"x", absolute: b"x"}


def test_decomposed_accents_match(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "mac.tar", {"cafe\u0301.jpg": b"x"})
    assert read(path, "caf\u00e9.jpg") == {"caf\u00e9.jpg": b"x"}


@pytest.mark.parametrize("kind", ["tar.gz", "zip", "tar"])
def test_truncated_archive_is_an_error_not_an_end(kind: str, tmp_path: Path) -> None:
    noise = bytes(i * 7919 % 251 for i in range(40_000))
    path = as_container(kind, tmp_path, {f"{i}.jpg": noise for i in range(4)})
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 5 + 100])
    with pytest.raises(ValueError, match=r"damaged or incomplete|is not a folder"):
        read(path, *(f"{i}.jpg" for i in range(4)))


def test_errors_of_open_store(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "x.tar").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"is not a folder, \.tar"):
        open_store(tmp_path / "x.tar")


def test_path_helpers() -> None:
    assert split_path("C:\\a\\..\\./b/c.jpg") == ("a", "b", "c.jpg")
    assert sorted(["10.jpg", "2.jpg", "a.jpg", "1.jpg"], key=natural_key) == ["a.jpg", "1.jpg", "2.jpg", "10.jpg"]
