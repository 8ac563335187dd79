"""What this machine can do: `auto` and 0 in the config become a device, a dtype and a number of threads."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime_core.config.load import stages
from slime_core.errors import ConfigError
from slime_core.memory import machine_memory
from slime_core.notices import notice
from slime_core.planning import automatic
from slime_core.planning.gpus import processor
from slime_core.planning.memory import with_keys
from slime_core.plugins.backends import cluster_of, engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.planning.gpus import Gpu

BF16_FLAGS = {"avx512_bf16", "amx_bf16"}  # processors whose bfloat16 products are faster than float32


def resolve_machine(config: Config, *, trains: bool = True) -> Config:
    """The config with device, dtype, cpu_threads and ``auto`` settled for this machine, or for those of its cluster.

    Args:
        trains: False where an engine has the GPU for itself, as in an evaluation

    Raises:
        ConfigError: CFG04 a GPU is asked for, or needed, and there is none; CFG17 no Ray cluster that could be asked
            for its GPUs.
    """
    device = config.cluster.device
    if device == "auto":
        device = _device(config)
    elif device == "cuda" and not cluster_of(config).remote and _device(config) == "cpu":
        raise _no_gpu()  # a Ray cluster that has too few says so itself
    if device == "cpu" and config.train.true_on_policy_mode:
        raise _no_kernels()
    dtype = config.train.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or cpu_flags() & BF16_FLAGS else "float32"
    processes = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node + engines_apart(config)
    if cluster_of(config).remote:
        processes += max(1, config.rollout.rollout_num_engines)
    threads = min(config.cluster.cpu_threads or max(1, len(os.sched_getaffinity(0)) // processes), threads_allowed())
    config = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"device": device, "cpu_threads": threads}),
            "train": config.train.model_copy(update={"dtype": dtype}),
        }
    )
    if cluster_of(config).remote:
        return automatic.without_plan(config)
    key, only = "rollout.debug_rollout_only", config.rollout.debug_rollout_only
    alone = with_keys(config, {key: only or not trains})
    config, line = automatic.with_plan(alone, _kind_of(device), main_memory=machine_memory())
    if line:
        notice("auto", line)
    return with_keys(config, {key: only})


def _kind_of(device: str) -> Gpu:
    """This machine's GPU, or its processors with its main memory."""
    if device == "cpu":
        return processor(machine_memory())
    import torch

    facts = torch.cuda.get_device_properties(0)
    return automatic.gpu_named(facts.name, facts.total_memory)


def preload(config: Config) -> None:
    """Begin to load what a GPU needs for its first products and attention, beside the imports that follow.

    Nothing where no trainer lives in this process; ``config`` is a resolved one.
    """
    cluster = config.cluster
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if cluster.device == "cuda" and ranks == 1 and not cluster_of(config).remote:
        threading.Thread(target=_first_kernels, name="slime-preload").start()


def _first_kernels() -> None:
    import torch

    with suppress(RuntimeError):  # whoever needs the GPU says what is wrong with it
        ones = torch.ones(1, 1, 64, 64, device="cuda")
        for square in (ones, ones.bfloat16()):
            torch.nn.functional.scaled_dot_product_attention(square, square, square @ square)
        torch.cuda.synchronize()


def threads_allowed() -> float:
    """``OMP_NUM_THREADS`` of the environment, infinite where it has none: more would be against the user's word."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdigit() and int(text) else math.inf


def _device(config: Config) -> Literal["cpu", "cuda"]:
    """``cuda`` where torch sees a GPU; on a cluster of several machines, where one of them has one."""
    if device := cluster_of(config).device(config):
        return "cuda" if device == "cuda" else "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _no_gpu() -> ConfigError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ConfigError(
        "cluster.device = cuda, and torch sees no GPU on this machine",
        code="CFG04",
        where="cluster.device",
        why=f"torch {_version('torch')}" + (f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""),
        fix="--device cpu   (or auto)\nslime doctor   shows what torch sees",
    )


def _no_kernels() -> ConfigError:
    return ConfigError(
        "train.true_on_policy_mode with device = cpu",
        code="CFG04",
        where="train.true_on_policy_mode",
        why="the kernels that trainer and engine share run on a GPU; on a CPU, float32 log-probs agree to about 1e-7",
        fix="--no-true-on-policy-mode",
    )


def engines_apart(config: Config) -> int:
    """Embedded engines that have a process of their own on this machine, 0 where one shares the trainer's.

    They have one where a stage runs ahead, or evaluates beside training: they generate while we train.
    """
    embedded = engine_of(config).embedded and not cluster_of(config).remote
    beside = any(stage.rollout.max_staleness or stage.eval.eval_async for stage in stages(config))
    if not embedded or not beside or config.rollout.debug_train_only:
        return 0
    return max(1, config.rollout.rollout_num_engines)


def machine_facts(config: Config) -> dict[str, Any]:
    """What the bits of a step depend on beside config and data, JSON-ready; ``config`` is a resolved one."""
    cluster = config.cluster
    facts = {
        "world": cluster.actor_num_nodes * cluster.actor_num_gpus_per_node,
        "device": cluster.device,
        "cpu_threads": cluster.cpu_threads,
        "dtype": config.train.dtype,
        "processor": hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16],
        "torch": _version("torch"),
        "numpy": _version("numpy"),
    }
    return facts


@lru_cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def cpu_flags() -> set[str]:
    """The processor's feature flags; empty where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set()
    lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())
