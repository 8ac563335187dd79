"""`megatron.core.mpu` where no Megatron trains: sizes 1, ranks 0, and the data-parallel ranks of torch.distributed."""

from __future__ import annotations

from functools import partial
from typing import Any

KINDS = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "context_parallel",
    "expert_model_parallel",
    "expert_tensor_parallel",
    "virtual_pipeline_model_parallel",
)


def _constant(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _world() -> Any:
    """torch.distributed, where it runs."""
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def get_data_parallel_rank(*args: Any, **kwargs: Any) -> int:
    """This process's rank; 0 without torch.distributed."""
    world = _world()
    return world.get_rank() if world else 0


def get_data_parallel_world_size(*args: Any, **kwargs: Any) -> int:
    """Processes; 1 without torch.distributed."""
    world = _world()
    return world.get_world_size() if world else 1


def get_data_parallel_group(*args: Any, **kwargs: Any) -> Any:
    """The group of all processes; None without torch.distributed."""
    world = _world()
    return world.group.WORLD if world else None


def get_data_parallel_src_rank(*args: Any, **kwargs: Any) -> int:
    """The first rank."""
    return 0


FACTS: dict[str, Any] = {
    **{f"get_{kind}_rank": 0 for kind in KINDS},
    **{f"get_{kind}_world_size": 1 for kind in KINDS},
    **{f"get_{kind}_group": None for kind in KINDS},
    "get_virtual_pipeline_model_parallel_world_size": None,
    "is_pipeline_first_stage": True,
    "is_pipeline_last_stage": True,
    "is_initialized": True,
    "model_parallel_is_initialized": True,
}
globals().update({name: partial(_constant, value) for name, value in FACTS.items()})

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
]
__all__ += list(FACTS)
