"""Captions to token ids, with the tokenizer that the model was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from torch import Tensor

from pipeline.model.packaged import PREFIX, packaged_path


class CaptionTokenizer:
    """Token ids of captions, cut to the batch's longest where the text tower does not look at padding.

    Args:
        spec: the model's open_clip configuration, see `DualEncoder.spec`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        text_cfg = spec["model_cfg"]["text_cfg"]
        self.context_length = int(spec["context_length"])
        reference = text_cfg.get("hf_tokenizer_name")
        if reference:
            source = str(packaged_path(reference)) if reference.startswith(PREFIX) else reference
            self.tokenizer = HFTokenizer(
                source,
                context_length=self.context_length,
                tokenizer_mode=text_cfg.get("tokenizer_mode"),
                **text_cfg.get("tokenizer_kwargs", {}),
            )
            self.pad_id = int(self.tokenizer.tokenizer.pad_token_id)
        else:
            self.tokenizer = SimpleTokenizer(context_length=self.context_length, **text_cfg.get("tokenizer_kwargs", {}))
            self.pad_id = 0
        self.cuts = _ignores_padding(text_cfg)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """int64 ids [B, L], padded. L is the length of the longest caption here, at most the context.

        A tower that looks at padding (SigLIP, CLIPA, MobileCLIP, CoCa) gets the whole context: L is the context then.
        """
        ids: Tensor = self.tokenizer(list(captions))
        if not self.cuts:
            return ids
        used = (ids != self.pad_id).any(dim=0).nonzero()
        return ids[:, : int(used[-1]) + 1].contiguous() if len(used) else ids[:, :1]


def _ignores_padding(text_cfg: dict[str, Any]) -> bool:
    """Whether features stay the same when padding is cut off: it is masked, or comes after the token that is pooled."""
    if "hf_model_name" in text_cfg:
        return True
    causal = not text_cfg.get("no_causal_mask", False)
    return causal and not text_cfg.get("embed_cls", False) and text_cfg.get("pool_type", "argmax") in ("argmax", "eos")
