"""One rank of the test of two that publish: by every route; rank 0 writes what it found."""

import json
import sys
from pathlib import Path

import trainer_bench as made
from safetensors.torch import save_file

from slime_core.errors import SlimeError
from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import WeightRoute
from slime_core.weights.folder import ModelFolder


def run(folder, out, thread, rank, world):
    config = made.config_of(folder, rollout={"rollout_engine": "sglang"})
    trainer = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
        rendezvous=out / "meet",
    )  # fmt: skip
    worker = trainer._worker
    route = WeightRoute(transport="disk", dtype="bfloat16", folder=str(out / "weights"))
    update = thread.call(worker.publish, 4, route)
    (out / "blocked").write_text("no folder")
    broken = WeightRoute(transport="disk", dtype="bfloat16", folder=str(out / "blocked"))
    error = ""
    try:
        thread.call(worker.publish, 5, broken)
    except SlimeError as raised:
        error = f"{raised.code} {raised.where}"
    staged = thread.call(worker.publish, 6, WeightRoute(transport="tensor", dtype="bfloat16"))
    if rank == 0:
        views = worker.senders.made["tensor"]._staging.views
        save_file({name: view.clone() for name, view in views.items()}, str(out / "staged.safetensors"))
    spread = WeightRoute(transport="tensor", dtype="bfloat16", copies=tuple(range(1, world)))
    copies = [(thread.call(worker.publish, version, spread).handle or {}).get("copies") for version in (7, 8)]
    views = worker.senders.made["tensor"]._staging.views
    save_file({name: view.clone() for name, view in views.items()}, str(out / f"copy-{rank}.safetensors"))
    answers = {
        "copies": copies,
        "disk": update.handle,
        "error": error,
        "tensor": staged.handle and len(staged.handle["buckets"]),
    }
    (out / f"answers-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    one_thread = TorchThread(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]), one_thread, int(sys.argv[3]), int(sys.argv[4]))
    one_thread.close()
