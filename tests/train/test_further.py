"""What objectives need beside features, temperature and ids, in real runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks
from tests.train.tiny import build_on_rank, losses_of, train_on_rank, write_recipe


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
