"""One rank of the tests of several: scores, steps, saves, restores and publishes; rank 0 writes what it found."""

import sys
from pathlib import Path

import torch
import trainer_bench as made
from safetensors.torch import save_file

from slime_core.plugins import load_plugins
from slime_core.plugins.result_checks import role_columns
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder

CASES = ("plain", "alone", "critic", "skipping", "broken", "divergent")
"""alone: fewer samples than ranks; skipping and broken: a loss that is not finite on one rank, tolerated or not;
divergent: the last rank has another batch."""


def run(case: str, folder: Path, out: Path, thread: TorchThread, rank: int = 0, world: int = 1) -> None:
    """Write ``CASE.safetensors`` and the folders ``CASE-saved`` and ``CASE-final`` into ``out``."""
    settings = {"max_tokens_per_gpu": 40, "num_steps_per_rollout": 2, "kl_loss_coef": 0.05, "lr": 1e-3}
    # AdamW divides by the size of the gradient: with its usual epsilon, rounding of a gradient near 0 would be compared
    settings["adam_eps"] = 1e-3
    roles = {"policy", "reference"}
    if case == "critic":
        settings |= {"advantage_estimator": "ppo", "critic_lr": 1e-3}
        roles |= {"values"}
    if case == "skipping":
        settings["max_nonfinite_steps"] = 4
    config = made.config_of(folder, **settings)
    trainer = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
        rendezvous=out / "meet" if world > 1 else None, errors=out / f"{case}-errors",
    )  # fmt: skip
    worker = trainer._worker
    thread.call(worker.begin, config)
    batch = made.batch_of(groups=1, rollouts=1, fan_out=False) if case == "alone" else made.batch_of()
    if case == "critic":
        torch.manual_seed(2)
        head = torch.randn(1, worker.critic.model.hf.config.hidden_size)
        rows = worker.critic.learner.locals()["score.weight"]
        rows.copy_(head[: len(rows)])
        batch.columns["returns"] = batch.columns["rollout_log_probs"].copy()
    scored = thread.call(worker.score, batch, frozenset(roles))
    batch.columns |= role_columns(scored)
    if case == "divergent" and rank == world - 1 > 0:
        batch.tokens[1] += 1
    if case in ("broken", "skipping"):
        batch.columns["advantages"][0] = float("inf")
    metrics = []
    try:
        metrics = [thread.call(worker.step, batch) for _ in range(2)]
    except RuntimeError as error:
        (out / f"{case}-error-{rank}").write_text(str(error))
    thread.call(worker.save, out / f"{case}-saved")
    worker.staging.wait()
    thread.call(worker.barrier)  # all ranks' files are there
    thread.call(worker.export, out / f"{case}-final")
    thread.call(worker.restore, out / f"{case}-saved")
    update = thread.call(worker.publish, 2)
    if rank == 0:
        found = {name: tensor.clone() for name, tensor in update.tensors.items()}
        found |= {f"score.{role}": torch.from_numpy(values.copy()) for role, values in role_columns(scored).items()}
        for i, row in enumerate(metrics):
            found |= {f"metric.{i}.{name}": torch.tensor(value).double() for name, value in row.items()}
        save_file(found, str(out / f"{case}.safetensors"))


if __name__ == "__main__":
    one_thread = TorchThread(1)
    for name in CASES:
        run(name, Path(sys.argv[1]), Path(sys.argv[2]), one_thread, int(sys.argv[3]), int(sys.argv[4]))
    one_thread.close()
