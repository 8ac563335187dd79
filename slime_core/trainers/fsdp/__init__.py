"""FSDP2, from one CPU process up: packed sequences, float32 masters, bfloat16 or float32 compute."""

from slime_core.trainers.fsdp.worker import FsdpWorker
from slime_core.trainers.trainer import WorkerTrainer

__all__ = ["FsdpTrainer"]


class FsdpTrainer(WorkerTrainer):
    """Trains the folder's model on data-parallel ranks; with one rank no launcher is needed.

    One float32 rank publishes its live storage, ``shared``; else updates are whole tensors.

    Example:
        trainer = FsdpTrainer(config, plugins, folder, thread=TorchThread(2))
        await trainer.begin(config)
        metrics = await trainer.step(batch)
    """

    worker_class = FsdpWorker
