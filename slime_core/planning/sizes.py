"""The weights of a model by name, shape and kind, from its config.json; and what a pass over them computes.

    config.json of a known family --arithmetic--> weights          milliseconds, no torch
    another family  --headers of its safetensors files--> weights  no torch
    another family without files --transformers on the meta device--> weights

Names are those of transformers' modules: experts of a layer are one stacked tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slime_core.lora.spec import LoraSpec
from slime_core.planning.vision import VisionSizes
from slime_core.weights.flops import Flops

Kind = Literal["embedding", "head", "attention", "mlp", "experts", "router", "norm", "other"]
KINDS: tuple[Kind, ...] = ("embedding", "head", "attention", "mlp", "experts", "router", "norm", "other")
FUSED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose layers the FSDP trainer writes out on a GPU, and the embedded engine runs without transformers."""
BIASED = {"qwen2": "qkv", "mimo": "qkv"}  # in every model of the family; the others say `attention_bias`
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe"})
EXPERT_FAMILIES = frozenset({"qwen3_moe"})
KNOWN = FUSED | HEAD_NORMS | EXPERT_FAMILIES | {"mimo", "smollm3"}


class ModelConfig:
    """config.json as attributes, the way transformers' configs have them; what it does not state is None."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = dict(raw)

    def __getattr__(self, name: str) -> Any:
        return self.raw.get(name)

    def get_text_config(self) -> ModelConfig:
        """The part that describes the language model."""
        inner = self.raw.get("text_config")
        return ModelConfig(inner) if isinstance(inner, Mapping) else self

    @classmethod
    def of(cls, source: Any) -> ModelConfig:
        """Of a model folder, a dictionary, or a config of transformers."""
        if isinstance(source, ModelConfig):
            return source
        if isinstance(source, (str, Path)):
            return cls(json.loads((Path(source) / "config.json").read_bytes()))
        return cls(source if isinstance(source, Mapping) else source.to_dict())


@dataclass(slots=True, frozen=True)
class Weight:
    """One tensor of a model; ``layer`` is -1 outside of the layers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int = -1
    linear: bool = False  # the weight of a linear layer

    @property
    def count(self) -> int:
        """Numbers."""
        return math.prod(self.shape)


@dataclass(slots=True, frozen=True)
class LayerSizes:
    """Widths of a decoder layer, which activations and the KV cache follow from."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    value: int
    inner: int  # of the MLP, or of all experts that a token is routed to
    experts: int = 0
    top_k: int = 0

    @property
    def qkv(self) -> int:
        """Columns of queries, keys and values together."""
        return self.heads * self.head + self.kv_heads * (self.head + self.value)


@dataclass(frozen=True)
class ModelSizes:
    """A model as plans count it.

    Example: ModelSizes.of(Path("my-model")).parameters
    """

    config: ModelConfig
    weights: tuple[Weight, ...]
    exact: bool = True  # shapes are the model's; else an estimate

    @classmethod
    def of(cls, source: Any, folder: Path | None = None) -> ModelSizes:
        """Of a model folder, a config.json's table, or a config of transformers.

        Args:
            folder: whose files have the tensors of a family that is not known here
        """
        config = ModelConfig.of(source)
        if folder is None and isinstance(source, (str, Path)):
            folder = Path(source)
        if config.model_type in KNOWN:
            return cls(config, tuple(_family_weights(config)))
        stored = _headers(folder) if folder is not None else ()
        return cls(config, stored or _skeleton(config))

    @cached_property
    def parameters(self) -> int:
        """Numbers that a trainer holds, tied ones once."""
        return sum(weight.count for weight in self.weights)

    def by_kind(self) -> dict[Kind, int]:
        """Numbers of each kind, without kinds that there are none of."""
        counts = {kind: sum(w.count for w in self.weights if w.kind == kind) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

    @cached_property
    def text(self) -> ModelConfig:
        """The language model's part of the config."""
        return self.config.get_text_config()

    @cached_property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.text.num_hidden_layers or self.text.n_layer or self.text.n_layers or 1)

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return int(self.text.vocab_size)

    @cached_property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return not any(weight.kind == "head" for weight in self.weights)

    @cached_property
    def layer(self) -> LayerSizes:
        """Of one layer; where layers differ, of the widest kind."""
        return _layer_sizes(self.text)

    @cached_property
    def fused(self) -> bool:
        """Whether both the trainer's and the engine's written-out layers fit the family."""
        act = self.text.hidden_act or "silu"
        plain = not (self.text.mlp_bias or (self.config.model_type == "llama" and self.text.attention_bias))
        return self.config.model_type in FUSED and act == "silu" and plain

    @cached_property
    def flops(self) -> Flops:
        """Of a token and of a pair of tokens, forward and backward, of the language model."""
        return Flops.of(self.text)

    @cached_property
    def active(self) -> int:
        """Weights that a token is multiplied by."""
        return round(self.flops.token / 6)

    def of_layers(self, first: int, count: int) -> int:
        """Numbers in ``count`` layers from ``first`` on."""
        return sum(weight.count for weight in self.weights if first <= weight.layer < first + count)

    def outside(self, *kinds: Kind) -> int:
        """Numbers outside of the layers, of these kinds alone where some are named."""
        return sum(w.count for w in self.weights if w.layer < 0 and (not kinds or w.kind in kinds))

    @cached_property
    def largest_layer(self) -> int:
        """Numbers of the largest layer."""
        return max((self.of_layers(n, 1) for n in range(self.layers)), default=0)

    def adapted(self, spec: LoraSpec) -> tuple[Weight, ...]:
        """Weights that adapters of a spec are on."""
        return tuple(
            weight
            for weight in self.weights
            if weight.layer >= 0
            and (
                spec.targets_parameter(weight.name, True)
                if weight.kind == "experts"
                else weight.linear and spec.targets(weight.name.removesuffix(".weight"), True)
            )
        )

    def unknown_names(self, spec: LoraSpec) -> list[str]:
        """Targets and exclusions that no layer is, of a family whose layers are known here."""
        if self.config.model_type not in KNOWN:
            return []
        adapted = self.adapted(spec)
        linear = [weight.name.removesuffix(".weight") for weight in adapted if weight.linear]
        stacks = [weight.name for weight in adapted if not weight.linear]
        layers = [w.name.rpartition(".")[0] for w in self.weights if w.linear or w.kind in ("experts", "router")]
        return [*spec.unmatched(linear, stacks), *spec.unused_exclusions([*layers, "lm_head"])]

    def adapter_numbers(self, spec: LoraSpec) -> int:
        """Numbers of one adapter: A and B of every weight [out, in], of each expert's, and DoRA's magnitudes."""
        return sum(spec.numbers(weight.shape, linear=weight.linear) for weight in self.adapted(spec))

    @cached_property
    def tower(self) -> VisionSizes | None:
        """The part that sees; None for a model of text alone."""
        return VisionSizes.of({weight.name: weight.shape for weight in self.weights}, self.config)

    @cached_property
    def kv_position(self) -> int:
        """Numbers of keys and values of a position, in all layers that keep them."""
        layer, text = self.layer, self.text
        kinds = text.layer_types or ()
        attending = sum(kind != "linear_attention" for kind in kinds) if kinds else self.layers
        if text.kv_lora_rank:  # transformers keeps whole keys and values
            return attending * layer.heads * (layer.head + layer.value)
        return attending * layer.kv_heads * (layer.head + layer.value)


def _layer_sizes(text: ModelConfig) -> LayerSizes:
    hidden = int(text.hidden_size or text.n_embd or text.d_model or 1)
    heads = int(text.num_attention_heads or text.n_head or 1)
    head = int(text.head_dim or hidden // heads)
    if text.kv_lora_rank:
        head = int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim)
    value = int(text.v_head_dim) if text.kv_lora_rank else head
    experts = int(text.num_experts or text.n_routed_experts or text.num_local_experts or 0)
    inner = int(text.intermediate_size or 4 * hidden)
    top_k = int(text.num_experts_per_tok or 0) if experts else 0
    if experts:
        width = int(text.moe_intermediate_size or inner)
        shared = int(text.shared_expert_intermediate_size or 0) or int(text.n_shared_experts or 0) * width
        inner = width * top_k + shared
    return LayerSizes(
        hidden, heads, int(text.num_key_value_heads or heads), head, value, inner, experts=experts, top_k=top_k
    )


def _family_weights(config: ModelConfig) -> Iterator[Weight]:
    """Every weight of a family of :data:`KNOWN`."""
    one = _layer_sizes(config)
    yield Weight("model.embed_tokens.weight", (config.vocab_size, one.hidden), "embedding")
    for number in range(int(config.num_hidden_layers)):
        prefix = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Weight(f"{prefix}.{name}.weight", (one.hidden,), "norm", number)
        yield from _attention(config, one, number)
        yield from _mlp(config, one, number)
    yield Weight("model.norm.weight", (one.hidden,), "norm")
    if not _tied(config):
        yield Weight("lm_head.weight", (config.vocab_size, one.hidden), "head", linear=True)


def _tied(config: ModelConfig) -> bool:
    """transformers' configs of these families are untied unless they say so; SmolLM3's are tied."""
    stated = config.tie_word_embeddings
    return config.model_type == "smollm3" if stated is None else bool(stated)


def _attention(config: ModelConfig, one: LayerSizes, number: int) -> Iterator[Weight]:
    prefix, queries, keys = f"model.layers.{number}.self_attn", one.heads * one.head, one.kv_heads * one.head
    biased = BIASED.get(config.model_type) or ("qkvo" if config.attention_bias else "")
    for name, rows, columns in (
        ("q", queries, one.hidden),
        ("k", keys, one.hidden),
        ("v", keys, one.hidden),
        ("o", one.hidden, queries),
    ):
        yield Weight(f"{prefix}.{name}_proj.weight", (rows, columns), "attention", number, linear=True)
        if name in biased:
            yield Weight(f"{prefix}.{name}_proj.bias", (rows,), "attention", number)
    if config.model_type in HEAD_NORMS:
        for name in ("q_norm", "k_norm"):
            yield Weight(f"{prefix}.{name}.weight", (one.head,), "norm", number)


def _mlp(config: ModelConfig, one: LayerSizes, number: int) -> Iterator[Weight]:
    prefix, inner = f"model.layers.{number}.mlp", int(config.intermediate_size)
    if config.model_type in EXPERT_FAMILIES and number in Flops.sparse_layers(config):
        width = int(config.moe_intermediate_size)
        yield Weight(f"{prefix}.gate.weight", (one.experts, one.hidden), "router", number)
        yield Weight(f"{prefix}.experts.gate_up_proj", (one.experts, 2 * width, one.hidden), "experts", number)
        yield Weight(f"{prefix}.experts.down_proj", (one.experts, one.hidden, width), "experts", number)
        return
    for name, shape in (
        ("gate", (inner, one.hidden)),
        ("up", (inner, one.hidden)),
        ("down", (one.hidden, inner)),
    ):
        yield Weight(f"{prefix}.{name}_proj.weight", shape, "mlp", number, linear=True)
        if config.mlp_bias:
            yield Weight(f"{prefix}.{name}_proj.bias", shape[:1], "mlp", number)


PATTERNS: tuple[tuple[str, Kind], ...] = (
    (r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.", "embedding"),
    (r"^(.*\.)?(lm_head|embed_out)\.", "head"),
    (r"norm|\.ln_", "norm"),
    (r"(router|mlp\.gate)\.", "router"),
    (r"experts", "experts"),
    (r"(attn|attention)\.", "attention"),
    (r"(mlp|feed_forward)\.", "mlp"),
)


def _classified(name: str, shape: tuple[int, ...]) -> Weight:
    """A tensor whose kind and layer its name tells."""
    kinds: list[Kind] = [kind for pattern, kind in PATTERNS if re.search(pattern, name)]
    kind: Kind = kinds[0] if kinds else "other"
    number = re.search(r"(?:layers|h)\.(\d+)\.", name)
    layer = int(number[1]) if number and "visual" not in name and "vision" not in name else -1
    linear = len(shape) == 2 and kind not in ("embedding", "router")
    return Weight(name, shape, kind, layer, linear=linear)


def _headers(folder: Path) -> tuple[Weight, ...]:
    """From the headers of a folder's files; nothing where it has none."""
    from slime_core.errors import DataError
    from slime_core.weights.shards import Shards

    try:
        infos = Shards.open(folder).infos
    except (DataError, OSError, ValueError):  # whoever opens it says so
        return ()
    return tuple(_classified(name, tuple(info.shape)) for name, info in infos.items())


def _skeleton(config: ModelConfig) -> tuple[Weight, ...]:
    """From transformers' modules on the meta device: it imports torch, and takes seconds."""
    from transformers import CONFIG_MAPPING

    from slime_core.weights.build import skeleton
    from slime_core.weights.native_configs import native_config

    raw = config.raw
    hf = native_config(raw) or CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    return tuple(_classified(name, tuple(p.shape)) for name, p in skeleton(hf).named_parameters())
