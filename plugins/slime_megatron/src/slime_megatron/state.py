"""megatron-core's own state of a process: its groups of ranks and its random numbers. Once a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from slime_core.errors import TrainerError

if TYPE_CHECKING:
    from slime_megatron.layout import Layout


def start(layout: Layout, seed: int) -> None:
    """Make the groups of a layout; the ranks have met.

    Raises:
        TrainerError: this process has the groups of another layout, or no device that megatron-core can use.
    """
    sizes = (layout.tp, layout.pp, layout.cp, layout.ep)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(layout.vp if layout.vp > 1 else None)
    if parallel_state.is_initialized():
        current = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if current != sizes:
            raise TrainerError(
                f"this process has Megatron groups of sizes {current} (tp, pp, cp, ep), not {sizes}",
                fix="one process holds trainers of one layout",
            )
        return
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise TrainerError(
            "megatron-core trains on GPUs, and there is none here",
            where="train.train_backend",
            why=str(error).splitlines()[0],
            fix="train_backend=fsdp trains on processors too",
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)
