"""One rank of the tests of invariance: a step's totals and gradients for each setting; rank 0 writes them."""

import sys
from pathlib import Path

import splits
import torch
import trainer_bench as made
from safetensors.torch import save_file

from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder


def run(folder, out, rank, world):
    """Write ``SETTING.safetensors`` into ``out``; every rank fails where the slow way finds another gradient."""
    thread, trainer = TorchThread(1), None
    for case, settings in splits.SETTINGS.items():
        config = made.config_of(folder, max_tokens_per_gpu=40, **settings)
        if trainer is None:
            trainer = FsdpTrainer(
                config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
                rendezvous=Path(out) / "meet" if world > 1 else None,
            )  # fmt: skip
        worker = trainer._worker
        thread.call(worker.begin, config)
        batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
        found = thread.call(worker.verify, batch)
        assert found["float64"] == 1
        assert max(found["gradient_error"], found["loss_error"]) < 1e-5, (case, found)
        totals, grads = thread.call(splits.step_of, worker, batch)
        if rank == 0:
            rows = grads | {f"total.{name}": torch.tensor(value).double() for name, value in totals.items()}
            save_file({name: row.contiguous() for name, row in rows.items()}, str(Path(out) / f"{case}.safetensors"))
    thread.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
