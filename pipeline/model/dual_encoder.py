"""The dual encoder: one module whose forward gives everything that a training step needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.tokenizer import CaptionTokenizer
from pipeline.model.tokens import NoWords, image_with_tokens, text_with_tokens

if TYPE_CHECKING:
    from pipeline.model.adapters.base import Adapters

MAX_LOG_SCALE = math.log(100.0)  # CLIP's own bound on the inverse temperature


class Features(NamedTuple):
    """What a forward pass gives. A modality that was not passed in is None.

    image_features: [B, D], L2-normalised. text_features: [B, D], L2-normalised.
    logit_scale: [1], the inverse temperature s, exponentiated and at most 100.
    image_tokens: [B, P, D], a feature per patch, text_tokens: [B, L, D], a feature per token, both L2-normalised, and
    text_mask: bool [B, L], which tokens are words; only when asked for.
    further: what a framework adds, for its own terms.
    """

    image_features: Tensor | None
    text_features: Tensor | None
    logit_scale: Tensor
    image_tokens: Tensor | None = None
    text_tokens: Tensor | None = None
    text_mask: Tensor | None = None
    further: dict[str, Tensor] | None = None


class _BoundedAbove(torch.autograd.Function):
    """min(x, bound) whose gradient is stopped only where it would push x further above the bound.

    A plain clamp would never let x come back down; an in-place clamp after the step is undone by ZeRO's fp32 master
    copy, which does not see it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(max=bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        # Descent moves x by -grad, so a positive gradient brings it back.
        return torch.where((x < ctx.bound) | (grad > 0), grad, torch.zeros_like(grad)), None


class DualEncoder(nn.Module):
    """An open_clip model behind a single `forward`.

    Under ZeRO-3 only the engine's forward gathers parameters, so a step never calls the towers on their own.
    Frozen modules and all batch norms stay in eval mode: what does not train must not drift.

    Args:
        clip: an open_clip `CustomTextCLIP`. Its scalar `logit_scale` is reshaped to [1], because ZeRO cannot
            broadcast a parameter without dimensions.
        spec: the open_clip configuration it was built from: {"model_cfg": ..., "preprocess_cfg": ...}.
        context_length: tokens; captions are cut to this.

    Attributes:
        framework: what a framework adds to a training step; its parameters train, and are no part of the encoders.
        adapters: what adapters stand on the encoders' layers, if any (`pipeline.model.adapters.adapt`).
    """

    framework: Any  # a pipeline.frameworks.Framework or None: that room imports this one

    def __init__(self, clip: nn.Module, spec: dict[str, Any], context_length: int) -> None:
        super().__init__()
        assert isinstance(clip.logit_scale, Tensor)
        clip.logit_scale = nn.Parameter(clip.logit_scale.detach().reshape(1))
        self.clip = clip
        self.spec = spec
        self.context_length = context_length
        self.framework = None
        self.adapters: Adapters | None = None

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        tokens: bool = False,
        extras: dict[str, Tensor] | None = None,
    ) -> Features:
        """Encode images [B, 3, H, W] and/or token ids [B, L]; the two batch sizes may differ.

        With `tokens`, features per patch and per word come from the same pass; `check_tokens` tells which models
        have them. With `extras`, the further inputs of a training batch, the framework encodes.
        """
        if extras is not None and self.framework is not None:
            encoded: Features = self.framework(self, pixel_values, input_ids, extras, tokens)
            return encoded
        return self.encode(pixel_values, input_ids, tokens)

    def encode(
        self, pixel_values: Tensor | None = None, input_ids: Tensor | None = None, tokens: bool = False
    ) -> Features:
        """`forward` without a framework."""
        image = text = image_tokens = text_tokens = text_mask = None
        if pixel_values is not None and tokens:
            image, image_tokens = image_with_tokens(self.clip.visual, pixel_values)
            image = F.normalize(image, dim=-1)
        elif pixel_values is not None:
            image = self.encode_image(pixel_values, normalize=True)
        if input_ids is not None and tokens:
            text, text_tokens, text_mask = text_with_tokens(self.clip.text, input_ids, self.no_words)
            text = F.normalize(text, dim=-1)
        elif input_ids is not None:
            text = self.encode_text(input_ids, normalize=True)
        return Features(image, text, self.logit_scale(), image_tokens, text_tokens, text_mask)

    @cached_property
    def pad_id(self) -> int:
        """The token id that captions are padded with."""
        return CaptionTokenizer(self.spec).pad_id

    @cached_property
    def no_words(self) -> NoWords:
        """Which token ids are no words."""
        return NoWords.of(self.spec)

    def encode_image(self, pixel_values: Tensor, normalize: bool = False) -> Tensor:
        """Images [B, 3, H, W], preprocessed, to features [B, D]; L2-normalised only when asked, as in open_clip."""
        features: Tensor = self.clip.visual(pixel_values)  # type: ignore[operator]
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, input_ids: Tensor, normalize: bool = False) -> Tensor:
        """Token ids [B, L], padded, L at most the context, to features [B, D]; see `encode_image`."""
        features: Tensor = self.clip.text(input_ids)  # type: ignore[operator]
        return F.normalize(features, dim=-1) if normalize else features

    def logit_scale(self) -> Tensor:
        """s = exp(log_scale), at most 100, shape [1], always fp32: bf16 would round 100 to 98.9 or 102."""
        assert isinstance(self.clip.logit_scale, Tensor)
        bounded: Tensor = _BoundedAbove.apply(self.clip.logit_scale.float(), MAX_LOG_SCALE)
        return bounded.exp()

    def train(self, mode: bool = True) -> DualEncoder:
        """Train mode for what trains; frozen modules and batch norms stay in eval mode."""
        super().train(mode)
        if mode:
            for module in self.modules():
                frozen = all(not p.requires_grad for p in module.parameters()) and any(
                    True for _ in module.parameters()
                )
                if frozen or isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def named_training(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What trains; see the function of this name."""
        return named_training(self.clip, self.framework)

    def encoder_state(self) -> dict[str, Tensor]:
        """The weights under open_clip's own names and shapes (a scalar `logit_scale`), adapters merged."""
        state = dict(self.clip.state_dict())
        if self.adapters is not None:
            state = self.adapters.merged(state)
        state["logit_scale"] = state["logit_scale"].reshape(())
        return state

    def load_encoder_state(self, state: dict[str, Tensor]) -> None:
        """Load weights in open_clip's names.

        Raises:
            ValueError: keys or shapes are not those of this model; names the first few.
        """
        state = dict(state)
        if "logit_scale" in state:
            state["logit_scale"] = state["logit_scale"].reshape(1)
        own = self.clip.state_dict()
        wrong = [k for k in own if k not in state] + [k for k in state if k not in own]
        wrong += [k for k in own if k in state and own[k].shape != state[k].shape]
        if wrong:
            raise ValueError(
                f"these weights do not fit the model: {len(wrong)} tensors are missing, unknown or of another shape, "
                f"first {', '.join(sorted(wrong)[:3])}. Was the checkpoint written by a run of another model?"
            )
        self.clip.load_state_dict(state)


def named_training(clip: nn.Module, framework: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    """What trains: parameters of the encoders under open_clip's names, those of a framework as `framework.NAME`."""
    further = () if framework is None else framework.named_parameters(prefix="framework")
    return ((name, p) for name, p in chain(clip.named_parameters(), further) if p.requires_grad)
