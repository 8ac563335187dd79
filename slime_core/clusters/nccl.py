"""What NCCL has to be told alike on both sides of a weight update by broadcast."""

from __future__ import annotations

from collections.abc import MutableMapping

MEMORY = "NCCL_CUMEM_ENABLE"
"""How NCCL shares memory between two processes. SGLang's servers turn it off unless it is set, and NCCL has it on: one
side then opens a handle of a kind that the other never made, and the first broadcast ends with `invalid argument`."""


def agree(environment: MutableMapping[str, str], *, symmetric: bool) -> None:
    """Set it for this process and those it starts, before NCCL is used here; a value that is there stays.

    Servers and trainer ranks inherit ``environment``; ``symmetric``: servers use symmetric memory, which needs it.
    """
    environment.setdefault(MEMORY, "1" if symmetric else "0")
