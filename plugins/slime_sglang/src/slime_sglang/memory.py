"""What a server of SGLang has on a GPU, as SGLang itself divides it: weights and KV cache take a fraction of it.

The fraction is `mem_fraction_static`; where nobody sets it, SGLang keeps room for passes by the GPU's size
(sglang 0.5.23, `arg_groups/memory_hook.py`), and slime sets it where server and trainer keep what they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.planning.decoding import SERVED
from slime_core.planning.footprint import EngineFootprint, Phase, Subject, TrainerFootprint
from slime_core.planning.gpus import GIB
from slime_sglang.adapters import adapter_names, served_targets
from slime_sglang.sharing import SHARE, SMALL, STATE, WRITTEN, options_set
from slime_sglang.topology import parallel_size, topology

if TYPE_CHECKING:
    from slime_core.config.schema import Config

PROCESS = 1536 << 20
"""Bytes of a server's process beside weights and cache: its context, and graphs that it keeps."""
SIZES = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (160, 8192, 256))
"""GiB of a GPU below which SGLang cuts prompts into chunks of so many tokens, and captures steps of so many rows."""
LARGEST = (16384, 512)
MIB = 1 << 20
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers whose adapters SGLang (0.5.23) holds together, all of them where one is a target."""
SPLIT_INPUT = ("o_proj", "down_proj")  # layers of which ranks have columns


def footprint(subject: Subject, trainer: TrainerFootprint | None) -> EngineFootprint:
    """See `EngineFootprint`.

    Raises:
        ConfigError: as `topology.topology` says.
    """
    config = _on_gpus(subject.config)
    servers = [group for group in topology(config).groups if group.role == "policy" or not group.frozen]
    group = servers[0]
    written = {name.replace("-", "_"): value for name, value in {**config.table("sglang"), **group.options}.items()}
    shared = trainer is not None and config.cluster.colocate
    gives = shared and config.cluster.offload_rollout and not _small(subject, config)
    tensor = parallel_size(group.gpus, written, group.where)
    quantised = config.rollout.rollout_quantization == "fp8"
    weights = int(subject.itemsize * subject.sizes.parameters / tensor * (0.5 if quantised else 1))
    memory = subject.gpu.memory
    fraction = float(
        written.get("mem_fraction_static") or (SHARE if shared and not gives else _fraction(memory, tensor))
    )
    size = _position(subject, tensor)
    adapters = adapter_buffers(subject, tensor)
    cache = max(0, int(memory * fraction) - weights - adapters)
    if limit := written.get("max_total_tokens"):
        cache = min(cache, int(limit) * size)
    process = {"engine adapters": adapters, "server process": PROCESS}
    always = {"engine weights": weights, "KV cache": cache, **process}
    phases: dict[Phase, dict[str, int]] = {"rollout": {**always, "engine passes": _passes(subject, memory, tensor)}}
    if gives:
        phases["sync"] = {"engine weights": weights, **process}
        resting = process
    else:
        phases["sync"] = resting = always
    phases |= {"score": resting, "train": resting, "update": resting}
    positions = cache // size
    return EngineFootprint(
        bytes=phases,
        sequences=positions // max(1, subject.lengths.longest),
        positions=positions,
        position_bytes=size * tensor,
        engines=sum(len(one.servers) for one in servers),
        gpus=max(1, group.gpus),
        shared=shared,
        gives_memory=gives,
        slots=config.rollout.server_concurrency,
        costs=SERVED,
        staging=config.rollout.update_weight_transport != "disk",
    )


def _on_gpus(config: Config) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cuda"})})


def _small(subject: Subject, config: Config) -> bool:
    """Whether the trainer's state is small enough to stay: as `sharing.gives_memory` has it, of the planned GPU."""
    if {name.replace("-", "_") for name in options_set(config)} & WRITTEN:
        return False
    models = 1 + len(subject.needs & {"reference", "values", "teacher"})
    return STATE * subject.sizes.parameters * models <= SMALL * subject.gpu.memory


def _sizes(memory: int) -> tuple[int, int]:
    """Tokens of a chunk of a prompt, and rows of the largest captured step."""
    return next(((chunk, rows) for gib, chunk, rows in SIZES if memory < gib * GIB), LARGEST)


def _fraction(memory: int, tensor: int) -> float:
    """SGLang's own `mem_fraction_static`."""
    chunk, rows = _sizes(memory)
    reserved = 512 + chunk * 1.5 + tensor / 8 * 1024 + rows * 2
    if memory > 60 * GIB:
        reserved = max(reserved, 10 * 1024)
    return round(max(0.0, 1 - reserved * MIB / memory), 3)


def _position(subject: Subject, tensor: int) -> int:
    """Bytes of a position on one GPU; key-value heads that are fewer than ranks are copied."""
    text: Any = subject.sizes.text
    if text.kv_lora_rank:  # compressed, the same on every rank
        return subject.itemsize * subject.sizes.layers * (int(text.kv_lora_rank) + int(text.qk_rope_head_dim))
    shares = min(tensor, subject.sizes.layer.kv_heads)
    return -(-subject.itemsize * subject.sizes.kv_position // shares)


def adapter_buffers(subject: Subject, tensor: int) -> int:
    """Bytes that one GPU holds ready for adapters: as many as are loaded, and a place for the base or a new version.

    SGLang joins the factors of queries, keys and values, and of gate and up: A of each has the rank's rows, and B a
    column for each number that comes out. Ranks share B of layers whose output they share, and A of those whose input.
    """
    names, layer = adapter_names(subject.config), subject.sizes.layer
    if not names:
        return 0
    targets = served_targets(subject.config, experts=bool(layer.experts))
    joined = {part for parts in JOINED.values() if targets & {*parts} for part in parts}
    numbers = 0
    for weight in subject.sizes.weights:
        name = weight.name.split(".")[-2]
        if weight.layer < 0 or not weight.linear or name not in targets | joined:
            continue
        rows, columns = weight.shape
        shares = min(tensor, layer.kv_heads) if name in ("k_proj", "v_proj") else tensor
        parts = len(JOINED.get(name, (name,)))
        numbers += rows + columns // tensor if name in SPLIT_INPUT else rows // shares + parts * columns
    return subject.itemsize * (len(names) + 1) * subject.config.train.lora_rank * numbers


def _passes(subject: Subject, memory: int, tensor: int) -> int:
    """What prompts and captured steps take for a while."""
    layer, (chunk, rows) = subject.sizes.layer, _sizes(memory)
    prompts = chunk * (4 * layer.hidden + (2 * layer.qkv + 3 * layer.inner) / tensor) * subject.itemsize
    return int(prompts + rows * 2 * MIB + rows * subject.sizes.vocab * 4)
