"""The source that the README of the room shows works as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shards import sources
from tests.shards.layouts import write_tar, write_tree
from tests.shards.reading import pairs, read_items, reasons
from tests.shards.real import caption, picture


def test_the_example_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(sources.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    assert len(example.splitlines()) < 50
    module: dict[str, Any] = {}
    exec(compile(example, "birds.py", "exec"), module)
    monkeypatch.setitem(sources.SOURCES, "birds", module["SOURCE"])

    notes = [
        {"bird_id": 17, "photo": "warblers/17.jpg", "notes": [caption(1), "small"], "part": "train", "species": "reed"},
        {"bird_id": 18, "photo": "18.jpg", "notes": caption(2), "part": "test"},
        {"bird_id": 19, "photo": "19.jpg", "part": "test"},
    ]
    source = write_tree(tmp_path / "birds", {"notes.json": json.dumps(notes).encode()})
    write_tar(source / "photos.tar", {"birds/warblers/17.jpg": picture(1), "birds/18.jpg": picture(2)})
    items = read_items("birds", source)
    found = pairs(items)
    assert {id: (pair.split, pair.captions, pair.meta) for id, pair in found.items()} == {
        "17": ("train", [caption(1), "small"], {"species": "reed"}),
        "18": ("test", [caption(2)], {}),
    }
    assert found["17"].image == picture(1)
    assert reasons(items) == {"line 3": "no 'notes' among bird_id, photo, part"}
    assert set(pairs(read_items("birds", source, splits="test"))) == {"18"}
