"""Fields of Megatron's configs that families share, and the functions that read them from a config.json.

Names on the left are those of megatron-core's TransformerConfig and of its GPTModel's constructor. What they cannot
say is refused with the config's own name and value (`refused`, TOK200).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_convert.bridge import Given, refused

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's scaled rotary embedding has built in."""


def head_dim(config: Any) -> int:
    """Rows of a head: ``head_dim``, or the hidden size over the heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def groups(config: Any) -> int:
    """Key-value heads; as many as heads where the config has none."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tied(config: Any) -> bool:
    """Whether the output layer is the embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def rope(config: Any) -> dict[str, Any]:
    """The rotary settings as one table, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    return parameters | {"rope_theta": theta or getattr(config, "default_theta", 10000.0)}


def rotary_base(config: Any) -> int | float:
    """The base of the rotary angles; whole where it is a whole number, as Megatron's flag wants it."""
    theta = float(rope(config)["rope_theta"])
    return int(theta) if theta.is_integer() else theta


def rotated_part(default: float) -> Callable[[Any], float]:
    """A reader of the part of each head that is rotated; ``default`` where the config is silent."""

    def read(config: Any) -> float:
        return float(rope(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", default)))

    read.__name__ = "rotated_part"
    return read


def llama3_scaling(config: Any) -> bool:
    """Whether angles are scaled as Llama 3.1 does.

    Raises:
        DataError: TOK200 another kind of scaling, or other bounds than those megatron-core has built in.
    """
    parameters = rope(config)
    kind = parameters["rope_type"]
    if kind not in ("default", "llama3"):
        raise refused(config.model_type, "rope_type", kind, "rotary angles are 'default' or scaled as 'llama3' does")
    for name, built_in in LLAMA3.items():
        value = parameters.get(name, built_in)
        if kind == "llama3" and value != built_in:
            raise refused(config.model_type, name, value, f"megatron-core scales angles with {name} = {built_in}")
    return bool(kind == "llama3")


def llama3_factor(config: Any) -> float:
    """How far angles are stretched; read where ``rope_scaling`` is true."""
    return float(rope(config).get("factor", 8.0))


def no_scaling(config: Any) -> bool:
    """False; any scaling of rotary angles is refused.

    Raises:
        DataError: TOK200.
    """
    kind = rope(config)["rope_type"]
    if kind != "default":
        raise refused(config.model_type, "rope_type", kind, "rotary angles of this family are 'default'")
    return False


def no_window(config: Any) -> None:
    """Attention to all that went before; a window that a layer uses is refused.

    Raises:
        DataError: TOK200.
    """
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None:
        active = any(kind != "full_attention" for kind in kinds)
    else:
        used = getattr(config, "use_sliding_window", config.model_type == "mistral")
        active = window is not None and window < config.max_position_embeddings and bool(used)
    if active:
        raise refused(config.model_type, "sliding_window", window, "attention reaches back to the first token here")


Fields = Mapping[str, str | Given | Callable[[Any], Any]]

DECODER: Fields = {
    # layers
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "normalization": Given("RMSNorm"),
    "layernorm_epsilon": "rms_norm_eps",
    "gated_linear_unit": Given(True),
    "activation_func": "hidden_act",
    "add_bias_linear": Given(False),
    "hidden_dropout": Given(0.0),
    # attention
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": groups,
    "kv_channels": head_dim,
    "add_qkv_bias": Given(False),
    "qk_layernorm": Given(False),
    "attention_dropout": Given(0.0),
    "window_size": no_window,
    # positions
    "position_embedding_type": Given("rope"),
    "rotary_base": rotary_base,
    "rotary_percent": Given(1.0),
    "rotary_interleaved": Given(False),
    "max_sequence_length": "max_position_embeddings",
    # ends
    "share_embeddings_and_output_weights": tied,
}

ONLY: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
"""Values of config.json that all families here want."""
