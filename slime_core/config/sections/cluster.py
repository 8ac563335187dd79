"""Keys of [cluster]."""

from __future__ import annotations

from typing import Literal

from slime_core.config.sections import LIMIT, MACHINE, Section, key


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
    colocate: bool = key(True, "Engine and trainer share the device and take turns.", MACHINE)
    offload_train: bool = key(
        True, "On shared GPUs the trainer's state waits in main memory while SGLang generates.", MACHINE
    )
    offload_rollout: bool = key(
        True, "On shared GPUs SGLang gives its weights and KV cache back while the trainer trains.", MACHINE
    )
    ray_address: str = key(
        "",
        "Ray cluster to join: HOST:PORT, auto (that of this machine) or local (one of its own, which ends "
        "with the run). Empty: RAY_ADDRESS, or local.",
        MACHINE,
        reader="other machines",
    )
    ray_placement_timeout: float = key(
        60.0,
        "Seconds to wait for processors and GPUs that others' work on the Ray cluster holds.",
        MACHINE,
        gt=0,
        reader="other machines",
    )
    ray_py_modules: tuple[str, ...] = key(
        (),
        "Wheels (of plugins, say) and package folders that ranks and engines on other machines of the Ray "
        "cluster get; nothing needs to be installed there.",
        MACHINE,
        path="input",
        reader="other machines",
    )
    ray_env_vars: dict[str, str] = key(
        {},
        "Environment of ranks and engines on the Ray cluster; Ray's tools show it.",
        MACHINE,
        reader="other machines",
    )
    max_restarts: int = key(
        -1,
        "How often a run resumes by itself after a process, server or machine failed or hung; "
        "-1: 3 on a Ray cluster, 0 elsewhere.",
        LIMIT,
        ge=-1,
    )
    hang_timeout: float = key(
        1800.0,
        "Seconds that a trainer call, or an engine with requests, may take without a sign of progress; "
        "then the run says who waits for whom and ends. 0: for ever.",
        LIMIT,
        ge=0,
    )
