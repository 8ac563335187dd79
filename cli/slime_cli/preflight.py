"""What a run needs of the machine, in numbers, before anything is loaded: better refused here than killed later."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime_cli.adapters import adapter_numbers
from slime_core.config.stages import rollout_slots, stages
from slime_core.errors import ConfigError, StorageError, TrainerError
from slime_core.memory import available_memory
from slime_core.plugins.backends import cluster_of, engine_of
from slime_core.weights.folder import parameter_count, text_config

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.config.schema import Config

GIB = 1 << 30
PROCESS = 640 << 20  # bytes of a process with torch and transformers loaded, measured on Linux, Python 3.11
PROMPT = 256  # tokens of a prompt where the config does not bound them
FILES = 256  # descriptors: libraries, ledger, segments, checkpoints
FILES_PER_PROCESS = 16  # sockets to ranks and engines
WANTED_FILES = 4096


def check_machine(config: Config, note: Callable[[str], None]) -> None:
    """Refuse a machine on which the run cannot work; raise the soft limit of open files where that helps.

    Raises:
        StorageError: STO120 too few open files are allowed.
        TrainerError: TRN131 no loopback, TRN132 too little memory, with the need of each part.
    """
    check_files(needed_files(processes(config)))
    check_loopback()
    if crowded := check_cores(config):
        note(crowded)
    needed, available = needed_memory(config), available_memory()
    if config.cluster.device != "cpu" or not needed:
        return
    if cache := cache_memory(config, available - sum(needed.values())):
        needed["for the KV cache"] = cache
    total = sum(needed.values())
    parts = ", ".join(f"{size / GIB:.1f} GiB {name}" for name, size in needed.items())
    if total > available:
        raise TrainerError(
            f"the run needs about {total / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are free",
            code="TRN132",
            where=config.rollout.hf_checkpoint,
            why=parts,
            fix="take a smaller model or fewer ranks (--actor-num-gpus-per-node 1), or a machine with more memory",
        )
    if total > 0.8 * available:
        note(f"notice: memory is short: about {total / GIB:.1f} of {available / GIB:.1f} GiB free ({parts})")


def check_inputs(settings: Settings, config: Config) -> None:
    """Refuse data, rewards and models that are not there, before a run directory is made or a model is loaded.

    Raises:
        ConfigError: CFG04 no data or no reward, or adapters of another kind to start from; CFG05 a file, set, model or
            adapter that cannot be had.
        DataError: rows, a model folder or an adapter folder that cannot be used.
    """
    from slime_cli.first_rows import first_rows
    from slime_core.builtin import no_reward
    from slime_core.lora.folder import check_start
    from slime_core.plugins.boundary import CORE
    from slime_core.weights.folder import read_config, resolve

    rollout = config.rollout
    read_config(resolve(rollout.hf_checkpoint), trust_remote_code=rollout.trust_remote_code)
    check_start(config.train)
    routing = settings.plugins.routing()
    answered = {(row["hook"], row["task"]) for row in routing if row["provider"] != CORE}
    provided = frozenset(task for hook, task in answered if hook == "slime_prompts")
    for stage in stages(config):
        for name, row in first_rows(stage, provided).items():
            judged = any((hook, name) in answered for hook in ("slime_reward", "slime_generate", "slime_rollout"))
            if judged or stage.train.offline or ("slime_sample_done", "*") in answered or row is None:
                continue
            task = next((task for task in stage.data.tasks if task.name == name), None)
            if not (row.metadata.get("rm_type") or (task and task.reward) or stage.reward.rm_type):
                raise no_reward(name)


def check_cores(config: Config) -> str:
    """A notice for trainer ranks that share this machine's cores; empty if each has its own."""
    cluster, cores = config.cluster, len(os.sched_getaffinity(0))
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if cluster.device != "cpu" or cluster_of(config).remote or ranks <= max(cores, 2):
        return ""
    return (
        f"notice: {ranks} trainer ranks share {cores} cores, so a step takes longer than with fewer; "
        f"without GPUs: --actor-num-gpus-per-node {cores}"
    )


def check_kept(at: Path | None) -> None:
    """Refuse a run directory in a folder that Ray unpacked for a job, and removes after it.

    Raises:
        ConfigError: CFG20.
    """
    path = (at or Path.cwd()).expanduser().absolute()
    if not {"runtime_resources", "working_dir_files"} <= set(path.parts):
        return
    raise ConfigError(
        "the run directory would be removed with the Ray job",
        code="CFG20",
        where=str(path),
        why="it is in the copy of --working-dir that Ray unpacked for this job on this machine alone",
        fix="--run-dir DIR   on a file system that all machines see",
    )


def needed_files(processes: int = 1) -> int:
    """Descriptors of a run with so many ranks and engines."""
    return FILES + FILES_PER_PROCESS * processes


def check_files(needed: int) -> None:
    """Raise the soft limit of open files to the hard one.

    Raises:
        StorageError: STO120.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < WANTED_FILES:
        limit = WANTED_FILES if hard == unlimited else min(WANTED_FILES, hard)
        if limit > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    if soft != unlimited and soft < needed:
        raise StorageError(
            f"this process may open {soft} files, a run needs {needed}",
            code="STO120",
            where="limit of open files",
            why=f"the hard limit is {hard}",
            fix=f"ulimit -n {WANTED_FILES}",
        )


def check_loopback() -> None:
    """A process reaches itself over 127.0.0.1: torch's process groups need it, a single rank's too.

    Raises:
        TrainerError: TRN131.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5):
                return
    except OSError as error:
        raise TrainerError(
            "the loopback interface does not work",
            code="TRN131",
            where="127.0.0.1",
            why=error.strerror or str(error),
            fix="ip link set lo up",
        ) from error


def processes(config: Config) -> int:
    """Processes with torch: the driver, ranks where there are several, an engine where it runs ahead."""
    ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    return 1 + (ranks if ranks > 1 else 0) + (1 if config.rollout.max_staleness else 0)


def needed_memory(config: Config) -> dict[str, int]:
    """Bytes by use, as float32 on a CPU; empty if the model's size is unknown."""
    count = parameter_count(Path(config.rollout.hf_checkpoint))
    if not count:
        return {}
    frozen = sum(parameter_count(Path(path)) for path in (config.train.ref_load, config.train.teacher_load) if path)
    served = 2 if config.train.dtype == "bfloat16" else 4
    adapters = adapter_numbers(config)
    return {
        "for processes": PROCESS * processes(config),
        "for weights, gradients and optimizer": 16 * adapters + served * count if adapters else 16 * count,
        "for the engine": served * count,
        **({"for frozen models": 4 * frozen} if frozen else {}),
    }


def cache_memory(config: Config, free: int) -> int:
    """Bytes of the embedded engine's KV cache: a step's samples within its half of ``free``, one at least."""
    if not engine_of(config).embedded:
        return 0
    count = tokens = 0
    for stage in stages(config):
        rollout = stage.rollout
        response = max(rollout.rollout_max_response_len, stage.eval.eval_max_response_len)
        tokens = max(tokens, (stage.data.rollout_max_prompt_len or PROMPT) + response)
        count = max(count, min(rollout_slots(config), rollout.rollout_batch_size * rollout.n_samples_per_prompt))
    try:
        raw = text_config(Path(config.rollout.hf_checkpoint))
        heads = raw["num_attention_heads"]
        width = raw.get("head_dim") or raw["hidden_size"] // heads
        tokens = min(tokens, config.rollout.rollout_max_context_len or raw["max_position_embeddings"])
        slot = 8 * raw["num_hidden_layers"] * (raw.get("num_key_value_heads") or heads) * width * tokens
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return int(max(slot, min(count * slot, free // 2)))
