"""Which settings make the passes of a layout smaller: lines for the message that memory ran out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_megatron.settings import MegatronSettings


def smaller(settings: MegatronSettings) -> list[str]:
    """``KEY=VALUE   (what it is)``, what costs least first; layouts are those that the ranks and heads divide by."""
    advice, layout, sizes = [], settings.layout, settings.sizes
    recompute = settings.transformer.get("recompute_granularity")
    if recompute != "full":
        advice.append(f"megatron.recompute_granularity=full   (it is {recompute or 'off'})")
    if layout.dp % 2 == 0:
        advice.append(f"megatron.context_parallel_size={2 * layout.cp}   (it is {layout.cp})")
        if sizes.groups % (2 * layout.tp) == 0 and (not sizes.experts or layout.etp == layout.tp):
            advice.append(f"megatron.tensor_model_parallel_size={2 * layout.tp}   (it is {layout.tp})")
    if not settings.optimizer.get("optimizer_cpu_offload"):
        advice.append("megatron.optimizer_cpu_offload=true")
    return advice
