"""Where flags that describe a model and its folder's config.json disagree."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slime_convert.bridge import Given
from slime_core.config.problems import Problem
from slime_core.config.values import show
from slime_core.weights.prediction_layers import layers
from slime_megatron.flags import MegatronFlag, flags

if TYPE_CHECKING:
    from slime_convert.bridge import Bridge, Sizes

DEFAULTS: dict[str, Any] = {
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "rope_scaling_factor": 8.0,
    "activation_func": "gelu",
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "moe_router_score_function": "softmax",
}
"""Of fields that a bridge may leave out; all others are then off, none or 1."""
IDLE_WITHOUT = {
    "rotary_scaling_factor": "yarn",
    "original_max_position_embeddings": "yarn",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "mscale": "yarn",
    "mscale_all_dim": "yarn",
}
"""Fields that mean nothing unless angles are of this kind."""


def disagreements(
    table: Mapping[str, Any], bridge: Bridge, hf_config: Any, fields: Mapping[str, Any], sizes: Sizes
) -> list[Problem]:
    """A problem for each flag whose claim about the model is not what config.json says.

    Args:
        table: [megatron], without problems of its own.
        known: what ``bridge.megatron(hf_config)`` gave.
    """
    rows, problems = flags(), []
    for written, value in table.items():
        flag = rows[written.replace("-", "_")]
        for path, claimed in flag.claims(value).items() if flag.role == "model" else ():
            field = path.partition(".")[2]
            if field == "rope_scaling_factor" and bridge.attention == "mla":
                field = "rotary_scaling_factor"
            if _idle(field, bridge, fields):
                continue
            actual = _actual(flag.kind, field, bridge, hf_config, fields, sizes)
            if not _same(field, claimed, actual, sizes):
                problems.append(_problem(flag, value, field, actual, bridge, hf_config))
    return list({problem.keys: problem for problem in reversed(problems)}.values())[::-1]


def _idle(field: str, bridge: Bridge, fields: Mapping[str, Any]) -> bool:
    """Whether a field means nothing for this model."""
    if field in IDLE_WITHOUT:
        return bool(fields.get("rope_type", "rope") != IDLE_WITHOUT[field])
    if field == "rope_scaling_factor":
        return not fields.get("rope_scaling")
    if field == "moe_router_pre_softmax":
        return fields.get("moe_router_score_function") == "sigmoid"
    if field in ("kv_channels", "add_qkv_bias"):
        return bridge.attention == "mla"
    return field == "ffn_hidden_size" and field not in fields


def _actual(kind: type, field: str, bridge: Bridge, hf_config: Any, fields: Mapping[str, Any], sizes: Sizes) -> Any:
    """What the field is for this model."""
    sure = {
        "vocab_size": sizes.vocab,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_dim,
        "multi_latent_attention": bridge.attention == "mla",
        "sandwich": bridge.sandwich,
        "experimental_attention_variant": "gated_delta_net" if sizes.linear_layers else None,
        "layers_ahead": layers(hf_config),
        "share_embeddings_and_output_weights": sizes.tied,
        "max_sequence_length": getattr(hf_config, "max_position_embeddings", None),
    }
    if field in fields:
        return fields[field]
    return sure[field] if field in sure else DEFAULTS.get(field, False if kind is bool else None)


def _same(field: str, claimed: Any, actual: Any, sizes: Sizes) -> bool:
    if field == "position_embedding_type" and actual == "mrope":
        return claimed in ("rope", "mrope")  # of text alone they are the same
    if field == "moe_layer_freq":
        return _layers(claimed, sizes.layers, lambda n, freq: n % freq == 0) == sizes.moe_layers
    if field == "linear_attention_freq":
        return _layers(claimed, sizes.layers, lambda n, freq: (n + 1) % freq > 0) == sizes.linear_layers
    if isinstance(claimed, bool) or isinstance(actual, bool):
        return bool(claimed) == bool(actual)
    if actual is None:
        return claimed in (None, 0, 1) and field.startswith(("moe_", "num_moe"))
    if isinstance(claimed, (int, float)) and isinstance(actual, (int, float)):
        return math.isclose(claimed, actual, rel_tol=1e-9)
    if isinstance(claimed, (list, tuple)) or isinstance(actual, (list, tuple)):
        return list(claimed if isinstance(claimed, (list, tuple)) else [claimed]) == list(
            actual if isinstance(actual, (list, tuple)) else [actual]
        )
    return str(getattr(actual, "__name__", actual)) == str(claimed)


def _layers(freq: Any, layers: int, has: Callable[[int, int], bool]) -> frozenset[int] | None:
    """Layers with experts or linear attention by Megatron's way to write them: ``2``, ``[0, 1]``, ``"[0]*1+[1]*2"``.

    ``has`` says what one number means for a layer.
    """
    if isinstance(freq, str):
        try:
            freq = _expression(ast.parse(freq, mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError):
            return None
    if isinstance(freq, int):
        return frozenset(n for n in range(layers) if has(n, freq)) if freq > 0 else None
    if not isinstance(freq, (list, tuple)) or len(freq) != layers:
        return None
    return frozenset(n for n, one in enumerate(freq) if one)


def _expression(node: ast.expr) -> Any:
    """The value of numbers, lists, ``+`` and ``*``, nothing else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_expression(part) for part in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _expression(node.left), _expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, int) != isinstance(right, int) and max(_long(left), _long(right)) <= 10_000:
            return left * right
    raise ValueError(ast.dump(node))


def _long(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


def _problem(flag: MegatronFlag, value: Any, field: str, actual: Any, bridge: Bridge, hf_config: Any) -> Problem:
    shown = "not set" if actual is None else show(getattr(actual, "__name__", actual))
    return Problem(
        code="CFG04",
        what=f"{flag.dashed} {show(value)} disagrees with the model folder, where {_field(flag, field)} is {shown}",
        keys=(("megatron", flag.name),),
        why=_source(field, bridge, hf_config),
        fix=f"leave {flag.dashed} out: the model is that of config.json\nor name another folder: --hf-checkpoint DIR",
    )


def _field(flag: MegatronFlag, field: str) -> str:
    return flag.name if flag.kind is not bool or field == flag.name else field


class _Reads:
    """A config that remembers which of its attributes were asked for."""

    def __init__(self, config: Any) -> None:
        self._config, self.names = config, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self._config, name)


def _source(field: str, bridge: Bridge, hf_config: Any) -> str:
    """Which attribute of config.json a field comes from."""
    plain = {
        "vocab_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
        "layers_ahead": "num_nextn_predict_layers",
        "share_embeddings_and_output_weights": "tie_word_embeddings",
    }
    source = bridge.fields.get(field, plain.get(field))
    if isinstance(source, str):
        return f"config.json: {source} = {show(getattr(hf_config, source, bridge.defaults.get(source)))}"
    if callable(source):
        reads = _Reads(hf_config)
        source(reads)
        names = list(dict.fromkeys(reads.names))
        entries = [f"{name} = {show(getattr(hf_config, name, None))}" for name in names]
        return f"config.json: {', '.join(entries)}" if entries else f"every {bridge.family} model has it so"
    if isinstance(source, Given):
        return f"every {bridge.family} model has it so"
    return f"no {bridge.family} model has it"
