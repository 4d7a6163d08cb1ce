"""What objectives need beside features, temperature and ids, in real runs."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import ModelConfig
from pipeline.model import build_model
from pipeline.runs import WEIGHTS, Run
from pipeline.train.further import KEPT, frozen_captions_of
from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, losses_of, train_on_rank, train_recording, write_recipe


def _inputs_of_a_batch(config: str, recipe: str) -> tuple[list[str], list[str], dict[str, torch.Tensor], torch.Tensor]:
    """Ids, captions and further inputs of the first batch, and its text features from the live encoder."""
    trainer = build_on_rank(config, recipe, [])
    batch = next(trainer.data.epoch(0))
    further = trainer.stepper.further([batch], torch.device("cpu"))
    trainer.engine.eval()
    live = trainer.encoder.encode_texts(batch["captions"])
    return batch["ids"], batch["captions"], further, torch.from_numpy(live)


def test_keys_of_captions_are_hashes_of_their_text(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    objective = {"name": "hn", "equal_captions": True}
    recipe = write_recipe(tmp_path, tiny_set, objective=objective)
    for _, captions, further, _ in ranks(2).run(_inputs_of_a_batch, "zero2", str(recipe)):
        assert further.keys() == {"caption_keys"}
        hashes = [int(hashlib.blake2b(c.encode(), digest_size=8).hexdigest(), 16) // 2 for c in captions]
        assert further["caption_keys"].tolist() == hashes


def test_frozen_features_are_those_of_the_encoder_at_the_start(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_set, objective={"name": "hn-frozen"})
    for _, _, further, live in ranks(2).run(_inputs_of_a_batch, "zero3", str(recipe)):
        assert further.keys() == {"frozen_text_features"}
        torch.testing.assert_close(further["frozen_text_features"], live, atol=1e-6, rtol=0)


@pytest.mark.parametrize("negatives", ["micro", "global"])
def test_a_frozen_margin_is_the_live_one_until_the_encoder_moves(
    negatives: str, ranks: Ranks, tiny_set: Path, tmp_path: Path
) -> None:
    """The same first loss; and the whole frozen run is the same on one rank, and when it is resumed."""
    batch = {"size": 16, "accumulate": 2, "negatives": negatives}
    live, frozen = ({"name": name, "gamma": 0.5} for name in ("hn", "hn-frozen"))
    recipe = str(write_recipe(tmp_path, tiny_set, objective=live, batch=batch))
    ranks(2).run(train_on_rank, "zero2", recipe, ["run.name=live"])
    recipe = str(write_recipe(tmp_path, tiny_set, objective=frozen, batch=batch))
    ranks(2).run(train_on_rank, "zero2", recipe, ["run.name=frozen"])
    ranks(1).run(train_on_rank, "zero2", recipe, ["run.name=alone"])
    runs = tmp_path / "runs"
    assert losses_of(runs / "frozen")[0] == pytest.approx(losses_of(runs / "live")[0], abs=1e-5)
    assert abs(losses_of(runs / "frozen")[-1] - losses_of(runs / "live")[-1]) > 1e-3
    # micro: one rank's micro-batch is both ranks' micro-batch together, so the losses agree.
    assert losses_of(runs / "alone") == pytest.approx(losses_of(runs / "frozen"), abs=1e-4)


def test_frozen_features_outlive_the_weights_they_came_from(ranks: Ranks, tiny_set: Path, tmp_path: Path) -> None:
    """Bitwise the uninterrupted run, though `model.init` has been trained further while the run was stopped."""
    init = tmp_path / "init.safetensors"
    recipe = str(write_recipe(tmp_path, tiny_set, objective={"name": "hn-frozen", "gamma": 0.5}))
    start = build_model(ModelConfig(name=str(tmp_path / "tiny-clip.json")))
    save_file({name: tensor.contiguous() for name, tensor in start.encoder_state().items()}, init)
    options = [f"model.init={init}"]
    ranks(2).run(train_on_rank, "zero1", recipe, [*options, "run.name=whole"])
    stopped = ranks(2).run(train_recording, "zero1", recipe, [*options, "run.name=cut"], None, 3)
    assert {code for code, _ in stopped} == {128 + signal.SIGTERM}
    save_file({name: tensor + 0.1 for name, tensor in start.encoder_state().items()}, init)
    ranks(2).run(train_on_rank, "zero1", recipe, [*options, "run.name=cut"], "auto")
    whole, cut = (Run(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert losses_of(cut.path) == losses_of(whole.path)
    newest = [run.latest() for run in (whole, cut)]
    weights = [load_file(checkpoint.path / WEIGHTS) for checkpoint in newest if checkpoint]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    (cut.path / KEPT).write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"frozen_captions\.safetensors cannot be read .*encoded again"):
        frozen_captions_of(cut, None, None, 8, Alone())  # type: ignore[arg-type]


class Alone:
    """Ranks of which there is one."""

    def on_main(self, action: Callable[[], Any]) -> Any:
        return action()
