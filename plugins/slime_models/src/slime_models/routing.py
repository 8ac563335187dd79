"""Which layers have experts and how a token finds its own: fields of Megatron's router, read from a config.json."""

from __future__ import annotations

from typing import Any

from slime_convert.bridge import Given, refused
from slime_models.fields import Fields


def sparse_layers(config: Any) -> list[int]:
    """Qwen3's pattern, 1 a layer of experts: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step, dense = int(getattr(config, "decoder_sparse_step", 1)), set(getattr(config, "mlp_only_layers", None) or ())
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config.num_hidden_layers)]


def layers_after_the_first(config: Any) -> list[int]:
    """DeepSeek's pattern: ``first_k_dense_replace`` dense layers, then experts."""
    first = int(getattr(config, "first_k_dense_replace", 0) or 0)
    return [int(layer >= first) for layer in range(config.num_hidden_layers)]


def softmax_over_all(config: Any) -> bool:
    """Whether weights are shares of all experts, and not of the chosen ones alone (``norm_topk_prob``).

    Raises:
        DataError: TOK200 one expert a token whose weight is always 1, which Megatron's router does not know.
    """
    normed = bool(getattr(config, "norm_topk_prob", False))
    if normed and config.num_experts_per_tok == 1:
        raise refused(
            config.model_type, "norm_topk_prob", True, "with num_experts_per_tok = 1 every weight would be 1"
        )
    return not normed


def normed_sigmoid(config: Any) -> str:
    """``sigmoid``: Megatron divides the scores of several chosen experts by their sum, and the score of one never.

    Raises:
        DataError: TOK200 where ``norm_topk_prob`` says otherwise.
    """
    normed, several = bool(getattr(config, "norm_topk_prob", True)), config.num_experts_per_tok > 1
    if normed != several:
        reason = f"with num_experts_per_tok = {config.num_experts_per_tok} it is {several} in megatron-core"
        raise refused(config.model_type, "norm_topk_prob", normed, reason)
    return "sigmoid"


def expert_groups(config: Any) -> int | None:
    """Groups of experts of which a token sees ``topk_group``; None where it sees them all."""
    return int(config.n_group) if chosen_groups(config) is not None else None


def chosen_groups(config: Any) -> int | None:
    """Groups that a token's experts come from; None where there is no choice.

    A group is judged by its two best experts; by ``num_experts_per_tok // topk_group`` in megatron-core.

    Raises:
        DataError: TOK200 where these are not two.
    """
    groups, chosen = int(getattr(config, "n_group", 1) or 1), int(getattr(config, "topk_group", 1) or 1)
    if chosen >= groups:
        return None
    if config.num_experts_per_tok // chosen != 2:
        reason = (
            f"megatron-core judges a group by its {config.num_experts_per_tok} // {chosen} best experts, not by two"
        )
        raise refused(config.model_type, "topk_group", chosen, reason)
    return chosen


def _experts(config: Any) -> int | None:
    return int(config.num_experts) if config.num_experts and any(sparse_layers(config)) else None


def _routed_experts(config: Any) -> int | None:
    return int(config.n_routed_experts) if any(layers_after_the_first(config)) else None


def _shared_size(config: Any) -> int:
    shared = int(config.n_shared_experts or 0)
    if not shared:
        raise refused(config.model_type, "n_shared_experts", shared, "every layer of experts has shared ones")
    return shared * int(config.moe_intermediate_size)


QWEN3_EXPERTS: Fields = {
    "num_moe_experts": _experts,
    "moe_layer_freq": sparse_layers,
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_score_function": Given("softmax"),
    "moe_router_pre_softmax": softmax_over_all,
    "moe_router_dtype": Given("fp32"),
}

DEEPSEEK_EXPERTS: Fields = {
    "num_moe_experts": _routed_experts,
    "moe_layer_freq": layers_after_the_first,
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": _shared_size,
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": expert_groups,
    "moe_router_group_topk": chosen_groups,
    "moe_router_score_function": normed_sigmoid,
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_enable_expert_bias": Given(True),
    "moe_router_bias_update_rate": Given(0.0),  # the bias is the folder's, and stays
    "moe_router_dtype": Given("fp32"),
}
