"""What NCCL has to be told alike on both sides of a weight update by broadcast."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.schema import Config

MEMORY = "NCCL_CUMEM_ENABLE"
"""How NCCL shares memory between two processes. SGLang's servers turn it off unless it is set, and NCCL has it on: one
side then opens a handle of a kind that the other never made, and the first broadcast ends with `invalid argument`."""


def agree(config: Config, environment: MutableMapping[str, str]) -> None:
    """Set it for this process and those it starts, before NCCL is used here; a value that is there stays.

    Servers and trainer ranks inherit ``environment``. Where they share GPUs nothing goes by NCCL between them.
    """
    cluster = config.cluster
    if config.rollout.rollout_engine == "sglang" and cluster.device == "cuda" and not cluster.colocate:
        symmetric = any(name.replace("-", "_") == "enable_symm_mem" and on for name, on in config.sglang.items())
        environment.setdefault(MEMORY, "1" if symmetric else "0")
