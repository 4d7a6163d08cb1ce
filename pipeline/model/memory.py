"""Less memory or less work in training, by open_clip's own means: both leave evaluation and the weights as they are."""

from __future__ import annotations

from typing import Any

from open_clip.hf_model import HFTextEncoder
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer


def checkpoint_gradients(clip: Any) -> None:
    """Compute activations again in the backward pass instead of keeping them, in both towers.

    Raises:
        ValueError: a tower cannot do it; says which.
    """
    if isinstance(clip.visual, ModifiedResNet):
        raise ValueError(_refusal("image", clip.visual))
    for name, tower in (("image", clip.visual), ("text", clip.text)):
        try:
            if isinstance(tower, HFTextEncoder):
                # The reentrant kind, transformers' default, gives no gradient where a tower's input needs none.
                options = {"use_reentrant": False}
                tower.transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            elif isinstance(tower, TimmModel):
                tower.trunk.set_grad_checkpointing(True)  # open_clip's own method hides a trunk that cannot
            else:
                tower.set_grad_checkpointing(True)
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            raise ValueError(_refusal(name, tower)) from error


def check_patch_dropout(visual: Any, rate: float) -> None:
    """Raise ValueError where open_clip would silently drop no patches."""
    if rate and not isinstance(visual, VisionTransformer | TimmModel):
        raise ValueError(f"model.patch_dropout is {rate}, but a {type(visual).__name__} has no patches to drop")


def _refusal(name: str, tower: Any) -> str:
    kind = type(getattr(tower, "trunk", getattr(tower, "transformer", tower))).__name__
    if isinstance(tower, ModifiedResNet):
        kind = type(tower).__name__
    return f"model.grad_checkpointing: the {name} tower ({kind}) cannot do it; leave it off"
