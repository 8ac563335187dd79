"""The FSDP2 backend as a `protocols.Trainer`."""

from __future__ import annotations

from slime_core.trainers.fsdp.worker import Worker
from slime_core.trainers.threaded import WorkerTrainer


class FsdpTrainer(WorkerTrainer):
    """Trains the folder's model on data-parallel ranks; with one rank no launcher is needed.

    One float32 rank publishes its live storage, ``shared``; else updates are whole tensors.

    Example:
        trainer = FsdpTrainer(config, plugins, folder, thread=TorchThread(2))
        await trainer.begin(config)
        metrics = await trainer.step(batch)
    """

    worker_class = Worker
