"""Late interaction after cosine: the best candidates of every query are ranked again, as FineLIP may at evaluation.

    score = 0.8 cosine + 0.2 S, S as in `pipeline.frameworks.finelip`

It needs the modules of the training and the tokens of both sides, which exported encoders do not have: its figures
stand beside those of plain cosine, never for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.evaluate.encode import Encoder, TorchEncoder, encode_split
from pipeline.evaluate.recall import RECALL_AT, inner_products, retrieval_metrics, summary
from pipeline.frameworks import make_framework
from pipeline.frameworks.finelip import FineLip, clim
from pipeline.model import DualEncoder, Features
from pipeline.runs import MANIFEST, read_json
from pipeline.train.checkpoint import STATE
from pipeline.train.entry import stored_recipe
from shards.reader import ShardReader

COSINE_SHARE = 0.8  # the paper's


def evaluate_reranked(
    encoder: Encoder, checkpoint: Path, reader: ShardReader, batch_size: int, top: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """`retrieval_metrics` of a split, and `reranked`, those of the second ranking; the split is encoded once.

    Raises:
        ValueError: the encoder is not that of a run of FineLIP.
    """
    by_parts = PartsEncoder(encoder, checkpoint)
    embeddings = encode_split(by_parts, reader, batch_size, progress=progress)
    images, texts = by_parts.parts(embeddings.image_embeds), by_parts.parts(embeddings.text_embeds)
    plain = retrieval_metrics(images[:, -1], texts[:, -1], embeddings.owner)
    return {**plain, "reranked": reranked_metrics(images, texts, embeddings.owner, top)}


class PartsEncoder(TorchEncoder):
    """Encodes to the condensed tokens of a picture or caption, [B, (K + 1) D]: row by row, the pooled feature last.

    Args:
        encoder: the torch encoder of a run's checkpoint.
        checkpoint: its folder.

    Raises:
        ValueError: the run is none of FineLIP, or the encoder none of a run.
    """

    def __init__(self, encoder: Encoder, checkpoint: Path) -> None:
        model = getattr(encoder, "forward", None)
        if not isinstance(model, DualEncoder) or not (checkpoint / STATE).is_file():
            raise ValueError(f"{checkpoint} has no late interaction to rank by: name a run of the framework finelip")
        assert isinstance(encoder, TorchEncoder)
        self.width = int(model.spec["model_cfg"]["embed_dim"])
        super().__init__(_Parts(model, load_finelip(model, checkpoint)), encoder.preprocess, encoder.tokenizer)

    def parts(self, embeds: NDArray[np.float32]) -> NDArray[np.float32]:
        """[B, K + 1, D]."""
        return embeds.reshape(len(embeds), -1, self.width)


class _Parts(nn.Module):
    def __init__(self, model: DualEncoder, framework: FineLip) -> None:
        super().__init__()
        self.model, self.framework = model, framework

    def forward(self, pixel_values: Tensor | None = None, input_ids: Tensor | None = None) -> Features:
        features = self.model.encode(pixel_values, input_ids, tokens=True)
        found = {name: parts.flatten(1) for name, parts in self.framework.parts(features).items()}
        return Features(found.get("image_parts"), found.get("text_parts"), features.logit_scale)


def load_finelip(model: DualEncoder, checkpoint: Path) -> FineLip:
    """FineLIP's modules as the checkpoint of a run has them, averaged where its encoders are.

    Raises:
        ValueError: the run is none of FineLIP.
    """
    chosen = stored_recipe(checkpoint.parent.parent).framework
    if chosen.name != "finelip":
        raise ValueError(f"{checkpoint} is of the framework {chosen.name!r}: only runs of finelip rank again")
    framework = make_framework(chosen.name, chosen.params(), model)
    assert isinstance(framework, FineLip)
    kind = "weight" if read_json(checkpoint / MANIFEST)["ema_decay"] is None else "ema"
    with safe_open(checkpoint / STATE, "pt") as file:
        state = {name: file.get_tensor(f"{kind}/framework.{name}") for name in framework.state_dict()}
    framework.load_state_dict(state)
    return framework.eval()


def reranked_metrics(
    image_parts: NDArray[np.float32], text_parts: NDArray[np.float32], owner: NDArray[np.int64], top: int
) -> dict[str, Any]:
    """Recall@K and median rank, as `retrieval_metrics` has them, after the best candidates were ranked again.

    Args:
        image_parts: [N, K + 1, D]. text_parts: [M, K' + 1, D]. The last of each is the pooled feature.
        owner: [M], the row of each caption's image.
        top: how many candidates of a query are ranked again.

    Returns:
        {"top": top, "t2i": {"1": ..., "median_rank": ...}, "i2t": {...}}
    """
    x, y = torch.from_numpy(image_parts), torch.from_numpy(text_parts)
    images, texts = image_parts[:, -1], text_parts[:, -1]
    all_images, all_texts = images.astype(np.float64), texts.astype(np.float64)
    t2i, i2t = [], []
    for j, own in enumerate(owner):
        late = partial(_late, x, y[j : j + 1])
        t2i.append(_rank(inner_products(texts[j : j + 1], all_images)[0], np.arange(len(x)) == own, top, late))
    for i in range(len(x)):
        late = partial(_late, y, x[i : i + 1])
        i2t.append(_rank(inner_products(images[i : i + 1], all_texts)[0], owner == i, top, late))
    return {"top": top, "t2i": summary(np.array(t2i), RECALL_AT), "i2t": summary(np.array(i2t), RECALL_AT)}


def _late(gallery: Tensor, query: Tensor, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
    """S, which is the same from both sides, of the query [1, K, D] and some of the gallery, in float64."""
    found: NDArray[np.float64] = clim(gallery[candidates].double(), query.double())[:, 0].numpy()
    return found


def _rank(
    cosine: NDArray[np.float32],
    right: NDArray[np.bool_],
    top: int,
    late: Callable[[NDArray[np.int64]], NDArray[np.float64]],
) -> int:
    """The place of the best right candidate. Others that score as high stand before it."""
    order = np.lexsort((right, -cosine))
    place = int(right[order].argmax())
    if place >= top:
        return place + 1
    candidates = order[:top]
    score = COSINE_SHARE * cosine[candidates] + (1 - COSINE_SHARE) * late(candidates)
    score, mine = score.astype(np.float32), right[candidates]
    return int((score[~mine] >= score[mine].max()).sum()) + 1
