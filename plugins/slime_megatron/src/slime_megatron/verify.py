"""A step's gradient by packs, shards and stages against transformers' own model; see `slime_core.trainers.verify`.

Shards are gathered on rank 0 under the names of the model folder, where both ways meet.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from slime_core.trainers.optimizer_step import LossSums
from slime_core.trainers.verify import Slow, Tensors, slow_model
from slime_core.trainers.vision import tower_of
from slime_core.weights import build
from slime_core.weights.transports.buckets import stream

if TYPE_CHECKING:
    from slime_core.trainers.data_parallel import RankBatch
    from slime_core.types import Columns, MicroBatch
    from slime_megatron.tensors import Tensors as Places
    from slime_megatron.worker import MegatronWorker

WHOLE_UP_TO = 10**9  # parameters of a model that ranks hold whole, in float32, only to see what rounding does


def gradients(worker: MegatronWorker, rank_batch: RankBatch, micros: list[MicroBatch]) -> tuple[float, Tensors]:
    """See `Worker.gradients`: named as in the model folder, whole on every rank; a collective."""
    tensors = worker.policy.trained.of_model()
    sums = LossSums(rank_batch, worker.device)
    worker.actor.zero_grad()
    worker.policy.passes.backward(micros, worker.loss, worker.train, sums)
    loss = worker.finish(sums)[0]["loss"]
    worker.actor.gather_gradients()
    local = {name: shard.tensor for name, shard in tensors.by_name.items()}
    parameters: dict[str, Any] = {name: tensor for name, tensor in local.items() if tensor.requires_grad}
    grads = {name: parameter.main_grad for name, parameter in parameters.items()}
    whole = _everywhere(tensors.like(grads), worker)
    if worker.policy.adapter is not None:
        whole = worker.policy.adapter.stacked(whole)
    worker.actor.zero_grad()
    return loss, {name: grad.double().cpu() for name, grad in whole.items()}


def log_probs_in(worker: MegatronWorker, rank_batch: RankBatch, dtype: torch.dtype) -> Columns:
    """Log-probs by transformers' model in a dtype, nothing of a model that is too large; a collective."""
    whole = build.skeleton(worker.folder.config, trust_remote_code=worker.folder.trust_remote_code)
    size = sum(p.numel() for p in whole.parameters())
    if size > WHOLE_UP_TO:
        return {}
    slow = worker.slow_way()
    slow.model.to(dtype)
    with torch.no_grad():
        rows = [slow.rows(rank_batch.batch, i)[0].float().cpu() for i in range(len(rank_batch.batch))]
    return {"log_probs": torch.cat(rows).numpy()}


@torch.no_grad()
def _everywhere(tensors: Places, worker: MegatronWorker) -> Tensors:
    """Whole tensors by their names in the model folder, float32, on every rank; a collective."""
    gathered: Tensors = {}
    for parts, tensor in stream(tensors.sources()):
        for part in parts:
            whole = torch.empty(part.shape, device=worker.device)
            if worker.rank == 0:
                whole.copy_(part.cut(tensor))
            dist.broadcast(whole, 0)
            gathered[part.name] = whole
    return gathered


def slow_copy(worker: MegatronWorker) -> Any:
    """transformers' model with the weights that the ranks hold together; a collective."""
    weights = {name: tensor.cpu() for name, tensor in _everywhere(worker.policy.tensors.of_model(), worker).items()}
    folder = worker.folder
    with TemporaryDirectory() as directory, torch.random.fork_rng(devices=[]):
        for file in [folder.path / "config.json", *folder.path.glob("*.py")]:
            shutil.copy(file, directory)
        save_file(weights, str(Path(directory) / "model.safetensors"), metadata={"format": "pt"})
        model: Any = build.load_converted(Path(directory), folder.config, "float32", "eager", folder.trust_remote_code)
    slow, tower = slow_model(model, worker.device), tower_of(model)
    if worker.policy.adapter is not None:
        worker.policy.adapter.put_on(slow, _everywhere(worker.policy.trained, worker))
    if tower is not None and worker.train.freeze_vision_tower:
        tower.freeze()
    return slow


def named(slow: Slow) -> Slow:
    """The same with gradients named as in model folders: some families keep experts apart there."""

    def rename(tensors: Tensors) -> Tensors:
        reverted: Tensors = revert_weight_conversion(slow.model, dict(tensors))
        return reverted

    return replace(slow, rename=rename)
