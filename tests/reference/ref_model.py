"""Qwen3, Qwen2 and Llama as plain float64 torch, one sequence at a time, from a dict of named tensors.

Written from the architectures' descriptions; imports nothing of slime, and of transformers only what a config holds.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """Rotary position embedding of [T, heads, d], halves paired."""
    length, _, dim = x.shape
    half = dim // 2
    freqs = torch.tensor([theta ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * freqs[None, :]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(p, prefix, x, config):
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def project(name, count):
        out = x @ p[f"{prefix}.{name}_proj.weight"].T
        if f"{prefix}.{name}_proj.bias" in p:
            out = out + p[f"{prefix}.{name}_proj.bias"]
        out = out.view(len(x), count, dim)
        norm = p.get(f"{prefix}.{name}_norm.weight")
        return out if norm is None else rms_norm(out, norm, config.rms_norm_eps)

    theta = config.rope_parameters["rope_theta"]
    q, k, v = rotate(project("q", heads), theta), rotate(project("k", kv_heads), theta), project("v", kv_heads)
    future = torch.ones(len(x), len(x)).triu(1).bool()
    outs = []
    for head in range(heads):
        kv = head * kv_heads // heads
        scores = (q[:, head] @ k[:, kv].T / math.sqrt(dim)).masked_fill(future, -math.inf)
        outs.append(torch.softmax(scores, dim=-1) @ v[:, kv])
    return torch.cat(outs, dim=-1) @ p[f"{prefix}.o_proj.weight"].T


def logits(p, config, tokens):
    """[T, vocab] of one sequence."""
    x = p["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        x = x + attention(
            p, f"{at}.self_attn", rms_norm(x, p[f"{at}.input_layernorm.weight"], config.rms_norm_eps), config
        )
        h = rms_norm(x, p[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = h @ p[f"{at}.mlp.gate_proj.weight"].T, h @ p[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ p[f"{at}.mlp.down_proj.weight"].T
    x = rms_norm(x, p["model.norm.weight"], config.rms_norm_eps)
    return x @ p.get("lm_head.weight", p["model.embed_tokens.weight"]).T


def log_probs(p, config, tokens, response_length, temperature=1.0):
    """Log-prob of each response token, and the entropy of its distribution, [R] each."""
    rows = logits(p, config, tokens)[-response_length - 1 : -1] / temperature
    all_log_probs = rows - torch.logsumexp(rows, dim=-1, keepdim=True)
    target = torch.tensor(tokens[-response_length:])
    return all_log_probs[torch.arange(response_length), target], -(all_log_probs.exp() * all_log_probs).sum(-1)
