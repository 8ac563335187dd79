"""The Megatron-core backend as a `protocols.Trainer`."""

from __future__ import annotations

from slime_core.trainers.trainer import WorkerTrainer
from slime_megatron.worker import MegatronWorker


class MegatronTrainer(WorkerTrainer):
    """Trains the folder's model on ranks that share it as [megatron] says; `layout.Layout` names the forms.

    Updates are whole tensors in the names of the model folder, gathered over all ranks. A checkpoint is a torch_dist
    folder in which each rank has a file (`saving`, `restoring`); an export is in the dtype of the parameters. What is
    released waits on the host, and comes back for `begin` and for calls that read or write state (`offload`);
    gradients come back as zeros.

    Example:
        trainer = MegatronTrainer(config, plugins, folder, thread=TorchThread(2), device="cuda")
        await trainer.begin(config)
        metrics = await trainer.step(batch)
    """

    worker_class = MegatronWorker
