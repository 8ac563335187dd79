"""What a tensor of a bridge is called in a torch_dist folder, and where in that key's tensor it lies.

    decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight      a bridge's name (local layer spec)
    decoder.layers.mlp.experts.experts.linear_fc2.weight [3 of 4, 5 of 8]     layers stacked, experts stacked
    decoder.layers.3.mlp.experts.experts.linear_fc2.weight [5 of 8]           layers apart

As in megatron-core 0.16 (TransformerBlock, SequentialMLP and MLP, `sharded_state_dict`). Layers are apart where they
are not all alike: `moe_layer_freq` a list or above 1, or some with linear attention. Written are these; read are also
experts apart, and gate and up apart (`weight_w`, `weight_v`), which is megatron-core's `singleton_local_shards`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_convert.bridge import Entry, Sizes

LAYERS = "decoder.layers."
LOCAL_EXPERTS = re.compile(r"mlp\.experts\.local_experts\.\d+\.")
PLAIN = ("embedding.", "output_layer.", "mlp.router.", "self_attention.linear_attn.")
"""Modules that keep no state beside their weights."""
OPTIMIZER = re.compile(r"(chained_\d+\.)?(optimizer\b|param_state)")
BESIDE = ("reference.", "critic.")  # before the keys of a run's other models
AHEAD = "mtp."  # before those of layers that predict further ahead
ADAPTERS = "adapters."  # before those of adapters, which a run saves without their base
AHEAD_LAYER = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
Attention = Literal["gqa", "mla"]

FUSED: dict[Attention, dict[str, str]] = {
    "gqa": {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    },
    "mla": {
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    },
}
"""Norms that Transformer Engine's layer spec keeps in the linear layer after them, and the local spec does at times:
megatron-core loads a folder that has both names with either."""


@dataclass(slots=True, frozen=True)
class DistPlace:
    """A part of the tensor ``key``: index and number of each axis that was put in front."""

    key: str
    lead: tuple[tuple[int, int], ...] = ()

    @property
    def index(self) -> tuple[int, ...]:
        """In the axes that were put in front."""
        return tuple(index for index, _ in self.lead)

    @property
    def of(self) -> tuple[int, ...]:
        """Sizes of those axes."""
        return tuple(of for _, of in self.lead)


def apart(fields: Mapping[str, Any]) -> bool:
    """Whether each layer has keys of its own; ``fields`` are those of `Bridge.megatron`."""
    freq = fields.get("moe_layer_freq", 1)
    return isinstance(freq, list) or freq > 1 or "linear_attention_freq" in fields


def places(entry: Entry, sizes: Sizes, attention: Attention, layers_apart: bool) -> list[DistPlace]:
    """Where a tensor is written, first under its own name, then under the other names that it is looked for."""
    return [_place(entry, rest, sizes, layers_apart, False) for rest in _names(entry, attention)]


def extra_states(place: DistPlace) -> str:
    """The key of the empty state that megatron-core's linear layers and norms look for; empty where there is none."""
    module, _, last = place.key.rpartition(".")
    name = module.removeprefix(LAYERS).lstrip("0123456789.") + "."
    if last != "weight" or name.startswith(PLAIN):
        return ""
    index, of = (place.index, place.of) if place.lead else ((0,), (1,))
    return f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, of))}"


def forms(entry: Entry, sizes: Sizes, attention: Attention) -> Iterator[tuple[DistPlace, ...]]:
    """Every way that a folder may hold a tensor; the rows of the places of one way, in order, are its rows."""
    for rest in _names(entry, attention):
        for layers_apart in (False, True):
            for experts_apart in (False, True) if entry.expert >= 0 else (False,):
                place = _place(entry, rest, sizes, layers_apart, experts_apart)
                yield (place,)
                if entry.kind == "gate_up":
                    yield tuple(DistPlace(f"{place.key}_{half}", place.lead) for half in "wv")


def _names(entry: Entry, attention: Attention) -> list[str]:
    """Its name within the layer, and those of other layer specs."""
    ahead = AHEAD_LAYER.match(entry.megatron)
    if entry.layer < 0 and ahead is None:
        return [entry.megatron]
    before = ahead[0] if ahead else ""
    name = entry.megatron.removeprefix(before or f"{LAYERS}{entry.layer}.")
    renamed = FUSED[attention].items()
    return [before + name, *(before + name.replace(a, b) for a, b in renamed if name.startswith(a))]


def _place(entry: Entry, rest: str, sizes: Sizes, layers_apart: bool, experts_apart: bool) -> DistPlace:
    lead = [] if layers_apart or entry.layer < 0 else [(entry.layer, sizes.layers)]
    if entry.expert >= 0:
        experts = f"mlp.experts.experts.{entry.expert}." if experts_apart else "mlp.experts.experts."
        rest = LOCAL_EXPERTS.sub(experts, rest)
        lead += [] if experts_apart else [(entry.expert, sizes.experts)]
    if entry.layer < 0:
        return DistPlace(rest, tuple(lead))
    return DistPlace(f"{LAYERS}{entry.layer}.{rest}" if layers_apart else LAYERS + rest, tuple(lead))
