"""The tensors of a small model by Hugging Face name, and what a tensor-parallel rank of SGLang holds of them.

Written from SGLang's loaders, not from `layout`: joined projections, experts, a padded vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

VOCAB, HIDDEN, LAYERS = 70, 8, 3


def small_config(**changes):
    """A qwen3 of a few numbers; what a transformers config has of it."""
    values = {
        "model_type": "qwen3", "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 12,
        "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def hf_tensors(config, seed=0):
    """Every tensor of the model by Hugging Face name."""
    draw = torch.Generator().manual_seed(seed)
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, qwen2 = config.hidden_size, config.model_type == "qwen2"
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        layer, attention = f"model.layers.{number}.", f"model.layers.{number}.self_attn."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, hidden)
            if config.attention_bias or qwen2:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        shapes[attention + "o_proj.weight"] = (hidden, q)
        if config.attention_bias and not qwen2:
            shapes[attention + "o_proj.bias"] = (hidden,)
        if config.model_type.startswith("qwen3"):
            shapes |= {f"{attention}{name}_norm.weight": (config.head_dim,) for name in "qk"}
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if config.model_type == "qwen3_moe":
            shapes[layer + "mlp.gate.weight"] = (config.num_experts, hidden)
            for expert in range(config.num_experts):
                shapes |= _mlp(f"{layer}mlp.experts.{expert}.", config.moe_intermediate_size, hidden)
        else:
            shapes |= _mlp(layer + "mlp.", config.intermediate_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def _mlp(prefix, inner, hidden):
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{prefix}{name}_proj.weight": shape for name, shape in shapes.items()}


class Rank:
    """What one tensor-parallel rank holds, filled tensor by tensor."""

    def __init__(self, config, rank=0, tp=1, ep=1, *, keeps_head=False):
        self.config, self.rank, self.tp, self.ep = config, rank, tp, ep
        self.keeps_head = keeps_head  # an output embedding of its own, although it is tied
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name, tensor):
        """Load one Hugging Face tensor."""
        for part, joined, order in (
            ("q_proj", "qkv_proj", 0), ("k_proj", "qkv_proj", 1), ("v_proj", "qkv_proj", 2),
            ("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1),
        ):  # fmt: skip
            if f".{part}." in name and ".experts." not in name:
                shards = self.tp
                if part in ("k_proj", "v_proj"):
                    shards = min(self.tp, self.config.num_key_value_heads)
                mine = tensor.chunk(shards)[self.rank // (self.tp // shards)]
                return self._join(name.replace(part, joined), order, 3 if joined == "qkv_proj" else 2, mine)
        if ".experts." in name:
            return self._expert(name, tensor)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            self._vocabulary(name, tensor)
            if self.keeps_head and self.config.tie_word_embeddings:
                self._vocabulary("lm_head.weight", tensor)
            return None
        columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        self.tensors[name] = (tensor.chunk(self.tp, dim=1)[self.rank] if columns else tensor).clone()
        return None

    def _vocabulary(self, name, tensor):
        multiple = 64 if -(-len(tensor) // 64) * 64 % self.tp == 0 else 64 * self.tp
        whole = torch.zeros(-(-len(tensor) // multiple) * multiple, tensor.shape[1])
        whole[: len(tensor)] = tensor
        self.tensors[name] = whole.chunk(self.tp)[self.rank].clone()

    def _join(self, name, order, count, mine):
        parts = self.__dict__.setdefault("parts", {}).setdefault(name, [None] * count)
        parts[order] = mine.clone()
        if all(part is not None for part in parts):
            self.tensors[name] = torch.cat(parts)

    def _expert(self, name, tensor):
        layer, _, rest = name.partition(".experts.")
        number, part = int(rest.split(".")[0]), rest.split(".")[1]
        inside = self.tp // self.ep
        each = self.config.num_experts // self.ep
        if number // each != self.rank // inside:
            return
        local, place = number % each, self.rank % inside
        inner, hidden = self.config.moe_intermediate_size // inside, self.config.hidden_size
        if part == "down_proj":
            w2 = self.tensors.setdefault(f"{layer}.experts.w2_weight", torch.zeros(each, hidden, inner))
            w2[local] = tensor.chunk(inside, dim=1)[place]
            return
        w13 = self.tensors.setdefault(f"{layer}.experts.w13_weight", torch.zeros(each, 2 * inner, hidden))
        begin = 0 if part == "gate_proj" else inner
        w13[local, begin : begin + inner] = tensor.chunk(inside)[place]
