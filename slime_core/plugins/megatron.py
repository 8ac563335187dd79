"""The hooks that a Megatron rank calls; every plugin that implements one is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.context import Context


@dataclass(slots=True, frozen=True)
class MegatronHooks:
    """``tell(hook, about, ctx, **arguments)`` calls all implementations of a hook."""

    tell: Callable[..., None]

    def init(self, args: Any, ctx: Context) -> None:
        """`slime_megatron_init`: parallel state is up, no model is built yet; ``args`` are the rank's `Settings`."""
        self.tell("slime_megatron_init", "a Megatron rank's start", ctx, args=args)

    def before_log_prob(self, model: Any, role: str, ctx: Context) -> None:
        """`slime_megatron_before_log_prob`: a forward-only pass is next."""
        self.tell("slime_megatron_before_log_prob", f"log-probs of {role}", ctx, model=model, role=role)

    def before_train_step(self, model: Any, optimizer: Any, step: int, ctx: Context) -> None:
        """`slime_megatron_before_train_step`: gradients are zero, and the step's first forward pass is next."""
        about = f"optimizer step {step}"
        self.tell("slime_megatron_before_train_step", about, ctx, model=model, optimizer=optimizer, step=step)
