"""Captions to token ids, with the tokenizer that the model was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from torch import Tensor

from pipeline.model.packaged import PREFIX, packaged_path


class CaptionTokenizer:
    """Token ids of captions, cut to the batch's longest where the text tower does not look at padding.

    Args:
        spec: the model's open_clip configuration, see `DualEncoder.spec`.

    Attributes:
        num_captions, num_cut: captions that this object has tokenized, and those that were longer than the context.
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
            self._pads_with_end = self.pad_id == self.tokenizer.tokenizer.eos_token_id
        else:
            self.tokenizer = SimpleTokenizer(context_length=self.context_length, **text_cfg.get("tokenizer_kwargs", {}))
            self.pad_id = 0
            self._pads_with_end = False
        self.cuts = _ignores_padding(text_cfg)
        self.num_captions = self.num_cut = 0

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """int64 ids [B, L], padded. L is the length of the longest caption here, at most the context.

        A caption that is longer than the context keeps its end token. A tower that looks at padding (SigLIP, CLIPA,
        MobileCLIP, CoCa) gets the whole context: L is the context then.
        """
        return self.with_cut(captions)[0]

    def with_cut(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The ids, and bool [B]: which captions were longer than the context and have lost their end."""
        ids: Tensor = self.tokenizer(list(captions))
        cut = self._were_cut(captions, ids)
        self.num_captions += len(captions)
        self.num_cut += int(cut.sum())
        if not self.cuts:
            return ids, cut
        used = (ids != self.pad_id).any(dim=0).nonzero()
        return (ids[:, : int(used[-1]) + 1].contiguous() if len(used) else ids[:, :1]), cut

    def _were_cut(self, captions: Sequence[str], ids: Tensor) -> Tensor:
        """Whether a caption has more tokens than the context; only one that fills it can."""
        cut = torch.zeros(len(captions), dtype=torch.bool)
        full = (ids[:, -1] != self.pad_id) | torch.tensor(self._pads_with_end)
        rows = full.nonzero().flatten().tolist()
        if not rows or ids.shape[1] < self.context_length:
            return cut
        filling = [captions[row] for row in rows]
        if isinstance(self.tokenizer, SimpleTokenizer):
            longer = self.tokenizer(filling, context_length=self.context_length + 1)[:, -1] != self.pad_id
        else:
            own = self.tokenizer
            encoded = own.tokenizer(
                [own.clean_fn(caption) for caption in filling], truncation=False, verbose=False
            ).input_ids
            longer = torch.tensor([len(tokens) > self.context_length for tokens in encoded])
        cut[rows] = longer
        return cut


def _ignores_padding(text_cfg: dict[str, Any]) -> bool:
    """Whether features stay the same when padding is cut off: it is masked, or comes after the token that is pooled."""
    if "hf_model_name" in text_cfg:
        return True
    causal = not text_cfg.get("no_causal_mask", False)
    return causal and not text_cfg.get("embed_cls", False) and text_cfg.get("pool_type", "argmax") in ("argmax", "eos")
