"""Keys of [cluster]."""

from __future__ import annotations

from functools import partial
from typing import Literal

from slime_core.config.sections import LIMIT, MACHINE, Section, key

on_machines = partial(key, reader="other machines")


class ClusterSection(Section):
    """Where engines and trainers live."""

    cluster_backend: str = key(
        "local", "local (this machine), ray, or one of a plugin. Short flag: --cluster.", MACHINE, min_length=1
    )
    actor_num_nodes: int = key(1, "Machines that train.", MACHINE, ge=1)
    actor_num_gpus_per_node: int = key(1, "Trainer ranks a machine; on CPU, processes.", MACHINE, ge=1)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto takes a GPU where torch sees one, on a Ray cluster where a machine of it has one.", MACHINE
    )
    cpu_threads: int = key(
        0, "Threads of each process's torch, at most `OMP_NUM_THREADS`; 0 is the cores divided.", MACHINE, ge=0
    )
    gpu_memory_limit: float = key(
        0.0, "GiB of a GPU that a trainer's process, with its embedded engine, takes; 0: all.", MACHINE, ge=0
    )
    colocate: bool = key(True, "Engine and trainer share the device and take turns.", MACHINE)
    offload_train: bool = key(
        True, "On GPUs too small for both, the trainer's state waits in main memory while SGLang generates.", MACHINE
    )
    offload_rollout: bool = key(
        True,
        "On GPUs too small for both, SGLang gives its weights and KV cache back while the trainer trains.",
        MACHINE,
    )
    ray_address: str = on_machines(
        "", "Ray cluster HOST:PORT, auto (this machine's), local (a new one); empty: RAY_ADDRESS or local.", MACHINE
    )
    ray_placement_timeout: float = on_machines(
        60.0, "Seconds to wait for CPUs and GPUs that other work on the Ray cluster occupies.", MACHINE, gt=0
    )
    ray_py_modules: tuple[str, ...] = on_machines(
        (), "Wheels and package folders sent to ranks and engines on other machines.", MACHINE, path="input"
    )
    ray_env_vars: dict[str, str] = on_machines(
        {}, "Environment of ranks and engines on a Ray cluster; its tools show it.", MACHINE
    )
    max_restarts: int = key(
        -1, "Restarts after a lost or hung process, server or machine; -1: 3 on a Ray cluster, else 0.", LIMIT, ge=-1
    )
    hang_timeout: float = key(
        1800.0,
        "Seconds without progress in a trainer call or an engine with requests that end a run; 0: no limit.",
        LIMIT,
        ge=0,
    )
