"""Features per patch and per word, for towers that have them: after the final norm, through the tower's own projection.

The pooled feature comes out of the same pass. Towers whose pooling is itself the projection (attention pooling) have no
feature per patch in the space of the captions.

image tower            patches
open_clip ViT          all tokens but the class token; `ln_post`, `proj`
timm ViT               all tokens but the prefix; `fc_norm` and the head that the pooled feature goes through
timm, a map of features  every place of the map, through the trunk's own head, as if it were the whole map
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from open_clip.hf_model import ClsPooler, HFTextEncoder
from open_clip.timm_model import TimmModel
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transformer import TextTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.model.tokenizer import CaptionTokenizer


class NoWords(NamedTuple):
    """Which token ids are no words: `ids`, and whatever follows `end`. CLIP's own tokenizer pads with a word's id."""

    ids: list[int]
    end: int | None

    @classmethod
    def of(cls, spec: dict[str, Any]) -> NoWords:
        """Those of a model's tokenizer; a token that stands for an unknown word is one."""
        tokenizer = CaptionTokenizer(spec).tokenizer
        if isinstance(tokenizer, SimpleTokenizer):
            return cls(list(tokenizer.all_special_ids), tokenizer.eot_token_id)
        own = tokenizer.tokenizer
        return cls([i for i in own.all_special_ids if i != own.unk_token_id], None)

    def words(self, input_ids: Tensor) -> Tensor:
        """bool [B, L] for token ids [B, L]."""
        words = ~torch.isin(input_ids, torch.tensor(self.ids, device=input_ids.device))
        return words if self.end is None else words & ((input_ids == self.end).cumsum(1) == 0)


def image_with_tokens(tower: Any, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """Images [B, 3, H, W] to the tower's output [B, D], and normalised patch features [B, P, D]."""
    if isinstance(tower, VisionTransformer):
        with giving_tokens(tower):
            pooled, patches = tower(pixel_values)
        patches = tower.ln_post(patches) if tower.final_ln_after_pool else patches
        patches = project(patches, tower.proj)
    else:
        features = tower.trunk.forward_features(pixel_values)
        pooled = tower.head(tower.trunk.forward_head(features))
        patches = tower.head(_places(tower.trunk, features))
    return pooled, F.normalize(patches, dim=-1)


def text_with_tokens(tower: Any, input_ids: Tensor, no_words: NoWords) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, L] to the tower's output [B, D], normalised token features [B, L', D] and which are words [B, L'].

    L' is L, or L - 1 where the tower keeps its class token to itself.
    """
    with giving_tokens(tower):
        pooled, tokens = tower(input_ids)
    words = no_words.words(input_ids)
    if isinstance(tower, HFTextEncoder):
        tokens = tower.proj(tokens)
        words = words[:, 1:] if tokens.shape[1] < words.shape[1] else words  # the class token comes first
    else:
        tokens = tower.ln_final(tokens) if tower.cls_emb is not None else tokens
        tokens = project(tokens, tower.text_projection)
    return pooled, F.normalize(tokens, dim=-1), words


def check_tokens(clip: Any) -> None:
    """Find out whether both towers give tokens.

    Raises:
        ValueError: one does not; says why.
    """
    visual, text = clip.visual, clip.text
    if isinstance(visual, VisionTransformer):
        reason = "it pools by attention" if visual.attn_pool is not None else None
    elif isinstance(visual, TimmModel):
        named = hasattr(visual.head, "pool") or getattr(visual.trunk, "attn_pool", None) is not None
        reason = "it pools by attention" if named else None
    else:
        reason = "only open_clip's VisionTransformer and timm trunks are known"
    if reason is not None:
        raise ValueError(_refusal("image", visual, reason))
    if isinstance(text, HFTextEncoder):
        if isinstance(text.pooler, ClsPooler) and text.pooler.cls_token_position != 0:
            raise ValueError(_refusal("text", text, "its class token is not the first"))
    elif not isinstance(text, TextTransformer):
        raise ValueError(_refusal("text", text, "only open_clip's TextTransformer and Hugging Face towers are known"))


def _refusal(kind: str, tower: Any, reason: str) -> str:
    return (
        f"the {kind} tower {type(tower).__name__} gives no features per token ({reason}): "
        "train a model whose towers do, or without what needs them (token.weight, framework)"
    )


def _places(trunk: Any, features: Tensor) -> Tensor:
    """Patches [B, P, C] of a timm trunk's features, through its own head; pooling one place leaves it as it is."""
    if features.ndim == 3:
        return _heads_of_tokens(trunk, features[:, getattr(trunk, "num_prefix_tokens", 0) :])
    last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
    return heads_of_places(trunk, (features if last else features.permute(0, 2, 3, 1)).flatten(1, 2))


def heads_of_places(trunk: Any, places: Tensor) -> Tensor:
    """Places [B, P, C] of a timm trunk's output, each through its own head: [B, P, D']."""
    if hasattr(trunk, "num_prefix_tokens"):  # a ViT
        return _heads_of_tokens(trunk, places)
    flat = places.reshape(-1, places.shape[-1])
    last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
    heads: Tensor = trunk.forward_head(flat[:, None, None, :] if last else flat[:, :, None, None])
    return heads.view(*places.shape[:2], heads.shape[-1])


def _heads_of_tokens(trunk: Any, tokens: Tensor) -> Tensor:
    for name in ("fc_norm", "head"):
        tokens = getattr(trunk, name, nn.Identity())(tokens)
    return tokens


def project(tokens: Tensor, projection: Any) -> Tensor:
    """Tokens [..., W] through a tower's projection, a matrix or a module; as they are where there is none."""
    if projection is None:
        return tokens
    return projection(tokens) if isinstance(projection, nn.Module) else tokens @ projection


@contextmanager
def giving_tokens(tower: Any) -> Iterator[None]:
    """open_clip's towers return their tokens as well while this is set."""
    before = tower.output_tokens
    tower.output_tokens = True
    try:
        yield
    finally:
        tower.output_tokens = before
