"""Small random models of every family, one with experts and a tokenizer, what transformers makes of a few packs, and the loss that both sides take."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slime_core.testing import tiny_model
from slime_core.types import MicroBatch

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 8,
    "head_dim": 4,
}
FAMILIES = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "qwen2-tied": {"model_type": "qwen2", "head_dim": 4, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "glm4": {"model_type": "glm4"},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "rope_parameters": YARN},
}
SPARSE = ("qwen3_moe", "deepseek_v3")
TENSOR, GROUPED = {"tensor_model_parallel_size": 2}, {"moe_grouped_gemm": True}
WITHIN = {"gradient_accumulation_fusion": True}  # the default on GPUs, no flag: the ranks set it
HALVES = {"make_vocab_size_divisible_by": 2}  # ids on both ranks; else the second has filling alone
LAYOUTS = {  # ranks, flags, families
    "one": (1, {}, tuple(FAMILIES)),
    "tensor": (2, TENSOR, tuple(FAMILIES)),
    "tensor, gradients within products": (2, TENSOR | WITHIN | HALVES, tuple(FAMILIES)),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}, tuple(FAMILIES)),
    "context": (2, {"context_parallel_size": 2, "use_distributed_optimizer": False}, tuple(FAMILIES)),
    "expert": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}, SPARSE),
    "expert tensor": (2, {"expert_tensor_parallel_size": 2, "use_distributed_optimizer": False}, SPARSE),
    "tensor, whole experts": (
        2,
        TENSOR | {"expert_tensor_parallel_size": 1, "use_distributed_optimizer": False},
        SPARSE,
    ),
    "grouped": (1, GROUPED, SPARSE),
    "grouped tensor": (2, GROUPED | TENSOR, SPARSE),
    "grouped tensor, expert": (
        2,
        GROUPED | TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        SPARSE,
    ),
    "grouped tensor, expert, expert tensor": (
        4,
        GROUPED | TENSOR | {"expert_model_parallel_size": 2, "use_distributed_optimizer": False},
        SPARSE,
    ),
}
ENTROPY = 0.1  # its weight in the loss


def loss(log_probs, entropy, columns, train):
    """Of each response token, by a column of its own, so that every row's gradient is another."""
    return columns["scale"] * (ENTROPY * entropy - log_probs), {}


def packs():
    """Two micro-batches: sequences of several lengths, one of them of a prompt that two share."""
    return [_pack([7, 12, 5], [3, 6, 2], seed=1), _pack([20, 3], [11, 1], seed=2)]


def _pack(lengths, responses, seed):
    draw = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = draw.integers(3, COMMON["vocab_size"], cu[-1])
    predict = np.concatenate([np.arange(end - r, end) - 1 for end, r in zip(cu[1:], responses, strict=True)])
    return MicroBatch(
        samples=np.arange(len(lengths)),
        tokens=tokens,
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=cu,
        prefix=np.full(len(lengths), -1, np.int32),
        predict=predict,
        target=tokens[predict + 1],
        response=np.arange(len(predict)),
        weight=np.linspace(0.5, 1.5, len(predict), dtype=np.float32),
        columns={"scale": draw.normal(size=len(predict)).astype(np.float32)},
    )


@dataclass
class Expected:
    """What transformers gives: float32, one sequence at a time."""

    log_probs: list
    entropy: list


def mixture(folder: Path) -> None:
    """A mixture of experts with the tokenizer of the tests' small dense model."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tiny_model(folder)
    kept = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id")
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        **{name: kept[name] for name in (*names, "pad_token_id")},
        bos_token_id=None, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=256,
        mlp_only_layers=[0], **EXPERTS,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def draw(name: str, root: Path) -> None:
    """Save the family's model under ``root/NAME/model``, and its gradients as a folder of the same names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(**{**COMMON, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 and "inv_freq" not in key:  # norms, biases: away from 1 and 0
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(root / name / "model")
    found, total = [], torch.zeros(())
    for micro in packs():
        edges = zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True)
        rows = [model(input_ids=torch.from_numpy(micro.tokens[a:b])[None]).logits[0] for a, b in edges]
        logs = torch.cat(rows)[micro.predict].log_softmax(-1)
        log_probs = logs.gather(1, torch.from_numpy(micro.target)[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        values, _ = loss(log_probs, entropy, {"scale": torch.from_numpy(micro.columns["scale"])}, None)
        total = total + (values * torch.from_numpy(micro.weight)).sum()
        found.append((log_probs.detach(), entropy.detach()))
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(root / name / "gradients")
    torch.save({"loss": total.detach(), "rows": found}, root / name / "expected.pt")
