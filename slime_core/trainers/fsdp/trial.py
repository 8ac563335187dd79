"""What a model can do, found out on a few tokens and one picture: packs, a linear head, pictures by our own way."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slime_core.media.features import own_logits, picture_probe
from slime_core.media.positions import MediaLayout
from slime_core.trainers.fsdp.attention import NAME, PackSegments, register
from slime_core.trainers.fsdp.blocks import text_of
from slime_core.trainers.media import PackMedia, PlacedItem
from slime_core.trainers.vision import PackPixels

TRIAL = (5, 3, 3)  # lengths of the sequences that a model is tried with
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05
"""Of what computes in bfloat16, by norms: rounding was seen to move outputs, and gradients of inputs, by 0.01."""


class PolicyTrial:
    """A few tokens through a model, one sequence at a time with its own attention, to compare with."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        device = next(hf.parameters()).device
        vocab = int(hf.config.get_text_config().vocab_size)
        self.tokens = torch.arange(1, 1 + sum(TRIAL), device=device) * 7 % vocab
        self.positions = torch.cat([torch.arange(n, device=device) for n in TRIAL])
        cu = np.concatenate([[0], np.cumsum(TRIAL)])
        self.segments = PackSegments.of(cu, np.full(len(TRIAL), -1), device)
        self._parts = [slice(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist())]

    @cached_property
    def logits(self) -> torch.Tensor:
        """Of each sequence alone, by the attention that the model has at the first call."""
        return torch.cat([self._logits(part) for part in self._parts])

    def _logits(self, part: slice, **kwargs: Any) -> torch.Tensor:
        ids, positions = self.tokens[None, part], self.positions[None, part]
        return self.hf(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0].float()  # type: ignore[no-any-return]

    def linear_head(self) -> bool:
        """Whether logits are the output matrix times the base model's last hidden state."""
        head, base, first = self.hf.get_output_embeddings(), self.hf.base_model, slice(0, TRIAL[0])
        if type(head) is not nn.Linear or base is self.hf:
            return False
        if getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None):
            return False  # of small logits a cap shows in no trial
        out = base(input_ids=self.tokens[None, first], position_ids=self.positions[None, first], use_cache=False)
        hidden = getattr(out, "last_hidden_state", None)
        return hidden is not None and close(head(hidden[0]).float(), self.logits[first])

    def packed(self) -> torch.Tensor:
        """Logits of all sequences as one pack."""
        return self._logits(slice(None), segments=self.segments)

    def layer(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers drawn for a layer, and what it makes of them: a gradient of the whole model may have no room."""
        size = int(self.hf.config.get_text_config().hidden_size)
        numbers = torch.arange(len(self.tokens) * size, device=self.tokens.device)
        x = torch.sin(numbers.float()).to(self.hf.get_input_embeddings().weight.dtype).view(1, -1, size)
        positions = self.positions[None]
        axes = MediaLayout.of(self.hf.config)
        three = positions[None].expand(3, -1, -1) if axes is not None and axes.three_axes else positions
        tables = text_of(self.hf).rotary_emb(x, position_ids=three)
        arguments = {"position_ids": positions, "position_embeddings": tables, "segments": self.segments}
        x.requires_grad_()
        return x, layer(x, attention_mask=None, **arguments)

    def packing(self) -> str:
        """Why sequences cannot be packed, or an empty string; the model then uses segment attention."""
        types = set(getattr(self.hf.config.get_text_config(), "layer_types", None) or ())
        if odd := types - {"full_attention", "sliding_attention"}:
            return f"layers of type {', '.join(sorted(odd))} cannot be packed"
        register()
        before, alone = self.hf.config.get_text_config()._attn_implementation, self.logits
        try:
            self._attend_by(NAME)
            if close(self.packed(), alone):
                return ""
            reason = "packed sequences see each other"
        except Exception as error:  # whatever a strange model or a kernel raises; single sequences run it as it is
            reason = f"segment attention is rejected ({(str(error) or type(error).__name__).splitlines()[0]})"
        self._attend_by(before)
        return reason

    def _attend_by(self, name: str) -> None:
        """Have the text model use transformers' attention of a name; a tower keeps its own."""
        alone = self.hf.config.get_text_config() is self.hf.config
        self.hf.set_attn_implementation(name if alone else {"text_config": name})


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * max(float(other.abs().max()), 1e-6))


def close_in_half(one: torch.Tensor, other: torch.Tensor, size: float | None = None) -> bool:
    """Of what computes in half precision, whatever it is given in.

    Args:
        size: that a difference is held against; the norm of ``other`` where it is None
    """
    size = float(other.float().norm()) if size is None else size
    return bool((one.float() - other.float()).norm() <= HALF_TOLERANCE * max(size, 1e-6))


def picture_logits(policy: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, vocabulary] of a small picture between words, by an `FsdpPolicy` and by transformers' own forward."""
    hf, layout = policy.hf, policy.tower.layout
    device = next(hf.parameters()).device
    tokens, arrays = picture_probe(hf.config, layout)
    items = layout.items(arrays)
    starts = layout.starts(tokens, items)
    axes = layout.positions(tokens, items, starts) if layout.three_axes else np.arange(len(tokens))
    media = PackMedia([PlacedItem(*pair, arrays) for pair in zip(items, starts, strict=True)], Path())
    ids, positions = (torch.from_numpy(array).to(device) for array in (tokens, axes))
    hidden = policy.hidden(ids, positions, None, PackPixels.of(media, device))
    return hf.get_output_embeddings()(hidden), own_logits(hf, layout, tokens, arrays)
