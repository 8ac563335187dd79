"""Whether a server that shares its GPU with the trainer gives memory back, or both keep what they have.

Moving memory costs a step more than a small model's training: where the trainer's state takes little of the GPU, the
server gets a fixed share of it and keeps that.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from slime_core.config.load import stages
from slime_core.errors import ConfigError
from slime_core.plugins.backends import cluster_of
from slime_core.weights.folder import parameter_count, resolve
from slime_sglang.topology import topology

if TYPE_CHECKING:
    from slime_core.config.schema import Config

STATE = 18  # bytes a parameter: float32 weights, gradients and two moments, and a copy in bfloat16
SMALL = 1 / 6  # of a GPU: trainer's state up to here stays there, beside activations
SHARE = 0.45  # of the GPU that the server then takes
WRITTEN = frozenset({"enable_memory_saver", "max_total_tokens", "mem_fraction_static"})


def shares(config: Config) -> bool:
    """Whether servers and trainer use the same GPUs."""
    return config.cluster.colocate and config.cluster.device == "cuda"


def options_set(config: Config) -> set[str]:
    """Names of SGLang's options that a person set, for all servers of the policy or for some."""
    groups = (group.options for group in topology(config).groups if not group.frozen)
    return set(config.table("sglang")).union(*groups)


def gives_memory(config: Config, written: Collection[str], total: int | None = None) -> bool:
    """Whether servers give memory back while the trainer trains.

    Args:
        config: device settled.
        written: as :func:`options_set` gives them: one of `WRITTEN` leaves the memory to them.
        total: bytes of a GPU; None looks here, 0 is not known.
    """
    if not (shares(config) and config.cluster.offload_rollout):
        return False
    if {name.replace("-", "_") for name in written} & WRITTEN:
        return True
    return not 0 < state_bytes(config) <= SMALL * (gpu_bytes(config) if total is None else total)


def state_bytes(config: Config) -> int:
    """Bytes of the trainer's models at most, as if one GPU held all; 0 where a size is not known."""
    trains = [stage.train for stage in stages(config)]
    policy = config.rollout.hf_checkpoint
    paths = [policy, *{path for train in trains for path in (train.ref_load, train.teacher_load) if path}]
    if any(train.advantage_estimator == "ppo" or train.critic_load for train in trains):
        paths.append(next((train.critic_load for train in trains if train.critic_load), policy))
    if any((train.kl_coef or train.kl_loss_coef) and not train.ref_load for train in trains):
        paths.append(policy)  # its first weights are the reference
    try:
        counts = [parameter_count(resolve(path)) for path in paths]
    except ConfigError:  # whoever opens it says so
        return 0
    return STATE * sum(counts) if all(counts) else 0


def gpu_bytes(config: Config) -> int:
    """Memory of this machine's first GPU; 0 where there is none, or the GPUs are other machines'."""
    import torch

    if cluster_of(config).remote or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)
