"""A model of 190 MB, and how much memory a process takes at most while it builds something of it."""

import ctypes
import gc
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from slime_core.kernels.quantised import stored_parts
from slime_core.testing import tiny_model
from slime_core.weights.build import skeleton
from slime_core.weights.folder import read_config
from slime_core.weights.folder_layout import FolderLayout

M_MMAP_THRESHOLD = -3
ROUNDING = 24 << 20
"""Bytes that rounding takes beside its weight: a million numbers at a time."""
SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


def mixture_folder(path, **shape):
    """A mixture of experts in bfloat16, its experts apart as they are published."""
    vocab = read_config(tiny_model(path)).vocab_size
    config = Qwen3MoeConfig(**SHAPE | shape, vocab_size=vocab, tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(path)
    model, draw = skeleton(config), torch.Generator().manual_seed(0)
    layout, tensors = FolderLayout(model), {}
    for name, parameter in model.named_parameters():
        for part in layout.parts(name, parameter.shape):
            tensors[part.name] = torch.empty(part.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=draw)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def peak_of(build):
    """Bytes that memory grows by at most, and what ``build`` returns; freed memory goes back at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    built = build()
    return memory("VmHWM") - before, built


def memory(kind):
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def sizes(module):
    """Bytes that parameters take, that they would take in 16 bits, and those of the largest so."""
    parameters = [parameter.detach() for parameter in module.parameters()]
    plain = [2 * one.numel() for one in parameters]
    return sum(part.nbytes for one in parameters for part in stored_parts(one)), sum(plain), max(plain)
