"""A trainer and an engine of a few tensors that speak route, publish, load and fingerprints; written from SGLang's
loaders, not from `layout`: tensor-parallel ranks, joined projections, a padded vocabulary.

What arrives goes through ``SmallEngine.fault`` first; a tensor that does not arrive stays as it was, as on a server.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from slime_core.types import WeightRoute, WeightUpdate
from slime_core.weights.canary import Choice, merged
from slime_core.weights.hashing import checksum, expected
from slime_sglang.layout import layout

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


def log_probs(embed, qkv, head, tokens, q_rows):
    """[n - 1] plain log-probs of each token after the one before: a model of one bilinear layer."""
    q, k = qkv[:q_rows], qkv[q_rows : q_rows + 6]
    hidden = embed[tokens[:-1]] @ (torch.eye(HIDDEN) + q[:6].T @ k)
    return torch.log_softmax(hidden @ head.T, dim=-1).gather(1, tokens[1:, None])[:, 0].numpy()


class SmallEngine:
    """One server of ``tp`` ranks, or several servers that hold the same."""

    def __init__(self, config, tp=1, servers=1, abilities=("score",), keeps_head=False):
        self.abilities, self.version, self.epoch = frozenset(abilities), -1, 1
        self.config, self.tp = config, tp
        self.servers = [[Rank(config, n, tp, keeps_head=keeps_head) for n in range(tp)] for _ in range(servers)]
        self.fault = lambda tensors, server: tensors
        self.choice = None
        self.asked: list[str] = []  # kinds of check
        self.start(hf_tensors(config, seed=99))

    def start(self, tensors):
        """What a server has read from its own folder."""
        for server in self.servers:
            for rank in server:
                for name, tensor in tensors.items():
                    rank.take(name, tensor)

    def names(self):
        """As `/weights_checker` tells them."""
        return list(self.servers[0][0].tensors)

    async def route(self, check):
        self.asked.append(check)
        self.choice = self.choice or Choice(layout(self.names(), self.config, self.tp))
        return WeightRoute(transport="disk", dtype="float32", checks=self.choice.take(check))

    async def load(self, update):
        for number, server in enumerate(self.servers):
            sent = self.fault(dict(update.tensors), number)
            for rank in server:
                for name, tensor in sent.items():
                    rank.take(name, tensor)
        self.version = update.version

    async def fingerprints(self):
        return merged({f"server {n}": self._told(server) for n, server in enumerate(self.servers)})

    def _told(self, server):
        return {
            name + (f"@{rank.rank}" if rank.rank else ""): checksum(tensor)
            for rank in server
            for name, tensor in rank.tensors.items()
        }

    async def score(self, tokens, start):
        ranks = [rank.tensors for rank in self.servers[0]]
        embed = torch.cat([held["model.embed_tokens.weight"] for held in ranks])
        head = torch.cat([held.get("lm_head.weight", held["model.embed_tokens.weight"]) for held in ranks])
        qkv = ranks[0]["model.layers.0.self_attn.qkv_proj.weight"]
        return log_probs(embed, qkv, head[:VOCAB], torch.tensor(tokens), 24 // self.tp)[start - 1 :]


class SmallTrainer:
    """Holds the Hugging Face tensors; a step changes all of them."""

    def __init__(self, config, seed=0):
        self.config, self.tensors = config, hf_tensors(config, seed)
        self.routes, self.roles = [], []
        self.rounding = {}  # role -> how far bfloat16 moves each log-prob, up and down in turn

    def step(self):
        self.tensors = {name: tensor + 0.01 * tensor.sin() + 0.001 for name, tensor in self.tensors.items()}

    async def publish(self, version, route=None):
        self.routes.append(route)
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        fingerprints = expected(tensors, route.checks, torch.float32) if route else {}
        return WeightUpdate(version=version, epoch=1, transport="small", tensors=tensors, fingerprints=fingerprints)

    async def score(self, batch, roles):
        self.roles.append(set(roles))
        found, names = [], {which: f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv"}
        embed = self.tensors["model.embed_tokens.weight"]
        qkv = torch.cat([self.tensors[name] for name in names.values()])
        for n in range(len(batch)):
            tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
            found.append(log_probs(embed, qkv, self.tensors.get("lm_head.weight", embed), tokens, 24))
        values = np.concatenate(found)
        turns = np.where(np.arange(len(values)) % 2, 1, -1).astype(np.float32)
        return {role: {"log_probs": values + self.rounding.get(role, 0) * turns} for role in roles}
