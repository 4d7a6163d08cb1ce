"""Tokens of a tower's last layer before its final norm and projection, for losses that pool some of them.

A mean over the patches of a box, or over the words of a sentence, goes through the tower's own head, and then lies
in the space of pictures and captions. Where a tower norms its last layer itself (timm trunks, Hugging Face text
towers), its tokens are what it gives, and the head is what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from pipeline.model.tokens import NoWords, check_tokens, giving_tokens, heads_of_places, project


class ImageTokens(NamedTuple):
    """pooled: the tower's output [B, D], not normalised. tokens: [B, P, W], row by row. grid: rows and columns."""

    pooled: Tensor
    tokens: Tensor
    grid: tuple[int, int]


class TextTokens(NamedTuple):
    """pooled: the tower's output [B, D], not normalised. tokens: [B, L, W]. words: bool [B, L], which are words.

    Position p of a caption's token ids is position `p - first` here: towers that keep their class token to themselves
    give one token less, and `first` is 1.
    """

    pooled: Tensor
    tokens: Tensor
    words: Tensor
    first: int


def image_last_layer(tower: Any, pixel_values: Tensor) -> ImageTokens:
    """Images [B, 3, H, W] through a tower that `check_tokens` has passed; all patches, so no patch dropout."""
    if isinstance(tower, VisionTransformer):
        with _output_of(tower.transformer) as found:
            pooled = tower(pixel_values)
        (height, width), (rows, columns) = pixel_values.shape[-2:], tower.conv1.kernel_size
        return ImageTokens(pooled, found[0][:, 1:], (height // rows, width // columns))
    features = tower.trunk.forward_features(pixel_values)
    pooled = tower.head(tower.trunk.forward_head(features))
    if features.ndim == 3:
        tokens = features[:, tower.trunk.num_prefix_tokens :]
        rows, columns = tower.trunk.patch_embed.grid_size
        return ImageTokens(pooled, tokens, (int(rows), int(columns)))
    if getattr(tower.trunk, "output_fmt", "NCHW") != "NHWC":
        features = features.permute(0, 2, 3, 1)
    return ImageTokens(pooled, features.flatten(1, 2), tuple(features.shape[1:3]))


def image_head(tower: Any, tokens: Tensor) -> Tensor:
    """Tokens or means of them [..., W] to features [..., D], not normalised."""
    if isinstance(tower, VisionTransformer):
        return project(tower.ln_post(tokens), tower.proj)
    flat = tokens.reshape(1, -1, tokens.shape[-1])
    features: Tensor = tower.head(heads_of_places(tower.trunk, flat))
    return features.reshape(*tokens.shape[:-1], -1)


def text_last_layer(tower: Any, input_ids: Tensor, no_words: NoWords) -> TextTokens:
    """Token ids [B, L] through a tower that `check_tokens` has passed."""
    words = no_words.words(input_ids)
    if isinstance(tower, HFTextEncoder):
        with giving_tokens(tower):
            pooled, tokens = tower(input_ids)
        first = words.shape[1] - tokens.shape[1]
        return TextTokens(pooled, tokens, words[:, first:], first)
    with _output_of(tower.transformer) as found:
        pooled = tower(input_ids)
    return TextTokens(pooled, found[0][:, : input_ids.shape[1]], words, 0)


def text_head(tower: Any, tokens: Tensor) -> Tensor:
    """Tokens or means of them [..., W] to features [..., D], not normalised."""
    if isinstance(tower, HFTextEncoder):
        features: Tensor = tower.proj(tokens)
        return features
    return project(tower.ln_final(tokens), tower.text_projection)


def check_last_layer(clip: Any) -> None:
    """Find out whether both towers give the tokens of their last layer, every patch in its place.

    Raises:
        ValueError: one does not; says why.
    """
    check_tokens(clip)
    trunk = getattr(clip.visual, "trunk", None)
    dropout = getattr(clip.visual if trunk is None else trunk, "patch_dropout", None)
    if getattr(dropout, "prob", 0.0):
        raise ValueError(
            "patches are looked up by their place, which patch dropout changes: set model.patch_dropout to 0"
        )
    if trunk is not None and not hasattr(trunk, "num_prefix_tokens") and not hasattr(trunk, "forward_intermediates"):
        raise ValueError(f"the image tower {type(trunk).__name__} gives no patches with a place: train a ViT or a CNN")


@contextmanager
def _output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """What the module gives inside."""
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()
