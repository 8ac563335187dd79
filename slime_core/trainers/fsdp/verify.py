"""A step's gradient by packs and shards against transformers' own model; see `slime_core.trainers.verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slime_core.trainers.dealing import check_portion, dealer_of
from slime_core.trainers.fsdp.sharding import full
from slime_core.trainers.share import Sums
from slime_core.trainers.verify import Slow, Tensors, compared, slow_model

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.rank import Rank
    from slime_core.types import Batch, MicroBatch


def verify(worker: Rank, batch: Batch) -> dict[str, float]:
    """Errors of one step's loss and gradients; a collective, the same answer on every rank."""
    dealer = dealer_of(worker, batch)
    batch = dealer.ready(batch)
    portion = dealer.portions(batch)[worker.rank]
    check_portion(worker, portion)

    def fast(micros: list[MicroBatch]) -> tuple[float, Tensors]:
        sums = Sums(portion, worker.device)
        worker.run_backward(micros, sums)
        loss = sums.finish(worker.world)[0]["loss"]
        grads = {name: _whole(p) for name, p in worker.parameters().items()}
        worker.forget()
        return loss, grads

    return compared(batch, worker.packs(portion), fast, slow_way(worker))


def slow_way(worker: Rank) -> Slow:
    """With the weights that the ranks hold now; a collective."""
    assert worker.stage is not None
    return Slow(_model(worker), worker.stage, worker.loss, worker.dtype, worker.rank, worker.world)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, of all its shards; a collective."""
    grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return full(grad.detach()).double().cpu()


def _model(worker: Rank) -> Any:
    """transformers' model with the weights that the ranks hold together; a collective."""
    weights = {name: full(p.detach()) for name, p in worker.parameters().items()}
    with torch.random.fork_rng(devices=[]):
        model: Any = worker.folder.build_model("float32", attn_implementation="eager")
    model = slow_model(model, worker.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model
