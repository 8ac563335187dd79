"""A causal language model in, a module that turns packs of tokens into log-probs and entropies out.

What a model can do is tried when it is built, on a few tokens: whether packed sequences give what single ones give,
and whether its logits are its output matrix times its last hidden state. Where not, one sequence a row is used, or
the model's own logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slime_core.algo.fused_loss import BlockLoss, linear_loss
from slime_core.algo.logprobs import linear_log_probs, logits_log_probs
from slime_core.trainers.compiling import Choice, Compiled, pays
from slime_core.trainers.fsdp.attention import NAME, Segments, register, take
from slime_core.trainers.fsdp.fused import fuse
from slime_core.trainers.share import Share, Sums, on

if TYPE_CHECKING:
    from slime_core.protocols import Loss
    from slime_core.types import MicroBatch

log = logging.getLogger(__name__)

TRIAL = (5, 3, 3)  # lengths of the sequences that a model is tried with
TOLERANCE = 1e-3


class Rows:
    """The response tokens of a pack. No dataclass, in which FSDP would turn temperatures to the dtype of compute."""

    __slots__ = ("predict", "target", "temperature")

    def __init__(self, predict: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor | None) -> None:
        self.predict = predict  # [R] int64, rows of the pack
        self.target = target  # [R] int64, token ids
        self.temperature = temperature  # [R] float32; None is 1


class Policy(nn.Module):
    """The root module that is sharded; ``hf`` is the transformers model, its parameters' names are the folder's."""

    def __init__(self, hf: Any, *, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self.chunk = chunk
        self.packs = False
        self.linear_head = False
        self.recompute = 0  # gradient checkpointing: of so many layers
        self.fused = False
        self.compiled = False
        self._made: dict[Callable[..., Any], Compiled] = {}
        for number, layer in enumerate(layers(hf)):
            self._choose_forward(layer, number)

    def choose_recomputing(self, train: Any) -> None:
        """Follow the [train] section's gradient checkpointing."""
        some = train.gradient_checkpointing_layers or len(layers(self.hf))
        self.recompute = some if train.gradient_checkpointing else 0

    def _choose_forward(self, layer: nn.Module, number: int) -> None:
        """Let the layer's forward follow ``fused``, ``compiled`` and ``recompute``."""
        own, fused = layer.forward, fuse(layer, self.hf.config)
        function = getattr(own, "__func__", None)  # of all layers of a class: it is compiled once for them

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.fused and fused is not None:
                return fused(*args, recompute=number < self.recompute, **kwargs)
            run: Callable[..., Any] = own
            if self.compiled and function is not None:
                run = partial(self._made.setdefault(function, Compiled(function)), layer)
            if number < self.recompute and torch.is_grad_enabled():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return run(*args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]

    def choose_compiling(self, choice: Choice) -> None:
        """Follow ``train.compile``; before the model is sharded."""
        parameters = list(self.hf.parameters())
        self.compiled = pays(choice, parameters[0].device, sum(p.numel() for p in parameters))

    def try_model(self) -> None:
        """Find out what the model can do, before it is sharded; leaves its attention as it will be used."""
        with torch.no_grad():
            trial = _Trial(self.hf)
            self.linear_head = trial.linear_head()
            reason = trial.packing()
        self.packs = not reason
        self.fused = self.packs and self._fusing_changes_nothing(trial)
        if reason:
            log.warning("%s: %s; training runs one sequence a row, slower", type(self.hf).__name__, reason)

    def _fusing_changes_nothing(self, trial: _Trial) -> bool:
        """Whether fused layers, on a CPU, give the model's own logits and gradients; False where none is known."""
        if trial.tokens.device.type != "cpu" or not any(fuse(layer, self.hf.config) for layer in layers(self.hf)):
            return False
        found = []
        for self.fused in (False, True):
            with torch.enable_grad():
                logits = trial.packed()
                grads = torch.autograd.grad(logits.square().mean(), list(self.hf.parameters()))
            found.append((logits.detach(), *grads))
        self.fused = False
        return all(_close(one, other) for one, other in zip(*found))

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segments: Segments,
        rows: Rows,
        loss: BlockLoss | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-prob of each target and entropy, both [R]; arguments as in `types.MicroBatch`, as tensors.

        With ``loss``, for models with a linear head, its sum alone, with the gradient taken in this pass.
        """
        kwargs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": position_ids[None], "use_cache": False}
        if self.packs:
            kwargs["segments"] = segments
        if not self.linear_head:
            logits = self.hf(**kwargs, logits_to_keep=rows.predict).logits[0]
            return logits_log_probs(logits, rows.target, temperature=rows.temperature)
        hidden = take(self.hf.base_model(**kwargs).last_hidden_state[0], rows.predict)
        head = self.hf.get_output_embeddings()
        more: dict[str, Any] = {"bias": head.bias, "temperature": rows.temperature, "chunk": self.chunk}
        if loss is not None:
            return (linear_loss(hidden, head.weight, rows.target, loss, **more),)
        return linear_log_probs(hidden, head.weight, rows.target, **more)


class _Trial:
    """A few tokens through a model, one sequence at a time with its own attention, to compare with."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        device = next(hf.parameters()).device
        vocab = int(hf.config.get_text_config().vocab_size)
        self.tokens = torch.arange(1, 1 + sum(TRIAL), device=device) * 7 % vocab
        self.positions = torch.cat([torch.arange(n, device=device) for n in TRIAL])
        cu = np.concatenate([[0], np.cumsum(TRIAL)])
        self.segments = Segments.of(cu, np.full(len(TRIAL), -1), device)
        parts = [slice(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist())]
        self.logits = torch.cat([self._logits(part) for part in parts])

    def _logits(self, part: slice, **kwargs: Any) -> torch.Tensor:
        ids, positions = self.tokens[None, part], self.positions[None, part]
        return self.hf(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0].float()  # type: ignore[no-any-return]

    def linear_head(self) -> bool:
        """Whether logits are the output matrix times the base model's last hidden state."""
        head, base, first = self.hf.get_output_embeddings(), self.hf.base_model, slice(0, TRIAL[0])
        if type(head) is not nn.Linear or base is self.hf:
            return False
        out = base(input_ids=self.tokens[None, first], position_ids=self.positions[None, first], use_cache=False)
        hidden = getattr(out, "last_hidden_state", None)
        return hidden is not None and _close(head(hidden[0]).float(), self.logits[first])

    def packed(self) -> torch.Tensor:
        """Logits of all sequences as one pack."""
        return self._logits(slice(None), segments=self.segments)

    def packing(self) -> str:
        """Why sequences cannot be packed, or an empty string; the model then uses segment attention."""
        types = set(getattr(self.hf.config.get_text_config(), "layer_types", None) or ())
        if odd := types - {"full_attention", "sliding_attention"}:
            return f"layers of type {', '.join(sorted(odd))} cannot be packed"
        register()
        before = self.hf.config._attn_implementation
        try:
            self.hf.set_attn_implementation(NAME)
            if _close(self.packed(), self.logits):
                return ""
            reason = "packed sequences see each other"
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            reason = f"segment attention is rejected ({str(error).splitlines()[0]})"
        self.hf.set_attn_implementation(before)
        return reason


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * max(float(other.abs().max()), 1e-6))


def layers(hf: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: what is sharded, and recomputed with gradient checkpointing, one by one."""
    names = set(getattr(hf, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in hf.modules():
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())  # a block inside a block belongs to it
    return found or [m for module in hf.modules() if isinstance(module, nn.ModuleList) for m in module]


def forward(
    policy: Policy, micro: MicroBatch, temperature: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every response token of the pack, [R]."""
    found: tuple[torch.Tensor, torch.Tensor] = policy(
        *on_device(micro, device), Rows(on(micro.predict, device), on(micro.target, device), temperature)
    )
    return found


def backward(
    policy: Policy, loss: Loss, train: Any, micro: MicroBatch, temperature: torch.Tensor | None, sums: Sums
) -> None:
    """Add the pack's share of the loss to the gradients, and its sums to ``sums``.

    Raises:
        TrainerError: a loss of another shape, or without a gradient.
    """
    if within_forward(policy, loss, train):
        rows = np.flatnonzero(micro.weight > 0)
        share = Share(loss, train, micro, rows, sums.device)
        place = torch.from_numpy(rows)
        mine = Rows(
            on(micro.predict[rows], sums.device),
            on(micro.target[rows], sums.device),
            temperature[place.to(temperature.device)] if temperature is not None else None,
        )
        (total,) = policy(*on_device(micro, sums.device), mine, share)
    else:
        share = Share(loss, train, micro, np.arange(len(micro.weight)), sums.device)
        total = share(slice(None), *forward(policy, micro, temperature, sums.device))
    total.backward()
    sums.add({"loss": total, **share.seen})
    if not torch.isfinite(total.detach()):
        share.blame(sums)


def within_forward(policy: Policy, loss: Loss, train: Any) -> bool:
    """Whether the gradient of the loss is taken inside the forward pass, so that logits are made once."""
    return policy.linear_head and loss.local is not None and loss.local(train)


def on_device(micro: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Tokens, their positions and the segments of a pack, as a model takes them."""
    segments = Segments.of(micro.cu_seqlens, micro.prefix, device)
    return on(micro.tokens, device), on(micro.position_ids, device), segments
