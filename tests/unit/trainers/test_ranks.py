"""Ranks over gloo: several processes do what one does, idle ranks included, and fail together."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_bench as made
from safetensors.torch import load_file, save_file

from slime_core.algorithms.shared.terms import role_columns
from slime_core.planning import fsdp as planned
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.adapters import members
from slime_core.trainers.data_parallel import take
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.shards import like, local
from slime_core.trainers.fsdp.slices import saved_tensors
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

CASES = ("plain", "alone", "critic", "adapters", "skipping", "broken", "divergent")
"""alone: fewer samples than ranks; adapters: two, by turns; skipping and broken: a loss that is not finite on one rank, tolerated or not;
divergent: the last rank has another batch."""


def train_rank(case: str, folder: Path, out: Path, thread: TorchThread, rank: int = 0, world: int = 1) -> None:
    """Write ``CASE.safetensors`` and the folders ``CASE-saved`` and ``CASE-final`` into ``out``."""
    settings = {"max_tokens_per_gpu": 40, "num_steps_per_rollout": 2, "kl_loss_coef": 0.05, "lr": 1e-3}
    # AdamW divides by the size of the gradient: with its usual epsilon, rounding of a gradient near 0 would be compared
    settings["adam_eps"] = 1e-3
    roles = {"policy", "reference"}
    if case == "critic":
        settings |= {"advantage_estimator": "ppo", "critic_lr": 1e-3}
        roles |= {"values"}
    if case == "adapters":
        settings |= {"lora_rank": 4, "lora_adapters": ["solver", "critic"], "lora_sync": "adapter"}
    if case == "skipping":
        settings["max_nonfinite_steps"] = 4
    config = made.config_of(folder, **settings)
    planned.FEW_TOKENS *= world - rank  # as if the devices were unlike: the last has room for least
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
    parts = [batch]
    if case == "adapters":
        batch.models = ["solver", "critic"] * (len(batch) // 2) + ["solver"] * (len(batch) % 2)
        parts = [take(batch, places) for _, places in members(batch, ("solver", "critic"))]
    for part in parts:
        scored = thread.call(worker.score, part, frozenset(roles))
        part.columns |= role_columns(scored)
    if case == "divergent" and rank == world - 1 > 0:
        batch.tokens[1] += 1
    if case in ("broken", "skipping"):
        batch.columns["advantages"][0] = float("inf")
    metrics = []
    found = {"most tokens": torch.tensor(worker.dp_rank.tokens)}
    try:
        metrics = [thread.call(worker.step, part) for _ in range(2) for part in parts]
    except RuntimeError as error:
        (out / f"{case}-error-{rank}").write_text(str(error))
    thread.call(worker.save, out / f"{case}-saved")
    worker.staging.wait()
    thread.call(worker.barrier)  # all ranks' files are there
    if case == "critic":
        thread.call(read_by_torch, worker, out / f"{case}-saved")
    thread.call(worker.export, out / f"{case}-final")
    thread.call(worker.restore, out / f"{case}-saved")
    update = thread.call(worker.publish, 2)
    if rank == 0:
        found |= {name: tensor.clone() for name, tensor in update.tensors.items()}
        found |= {f"score.{role}": torch.from_numpy(values.copy()) for role, values in role_columns(scored).items()}
        for i, row in enumerate(metrics):
            found |= {f"metric.{i}.{name}": torch.tensor(value).double() for name, value in row.items()}
        save_file(found, str(out / f"{case}.safetensors"))


def read_by_torch(worker, path):
    """Each rank's rows of all that was saved, read by torch.distributed.checkpoint, are what the rank has."""
    state = dict(worker.actor.parameters())
    state |= {f"critic.{name}": parameter for name, parameter in worker.critic.learner.parameters().items()}
    state |= {
        f"reference.{name}": like(worker.frozen.reference[name], p) for name, p in worker.actor.parameters().items()
    }
    for prefix, learner in (("", worker.actor), ("critic.", worker.critic.learner)):
        for which in ("moment1", "moment2"):
            for name, moment in getattr(learner.optimizer, which).items():
                state[f"{prefix}{which}.{name}"] = like(moment, learner.parameters()[name])
    read = {name: torch.full_like(tensor.detach(), 7.0) for name, tensor in state.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    for name, tensor in state.items():
        assert torch.equal(local(read[name]), local(tensor.detach())), name


WORLDS = [2, pytest.param(3, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    out, thread = tmp_path_factory.mktemp("one"), TorchThread(1)
    for case in CASES:
        train_rank(case, folder, out, thread)
    thread.close()
    return out


@pytest.fixture(scope="module", params=WORLDS, ids="{}_ranks".format)
def together(request, folder, zygote, tmp_path_factory):
    out, world = tmp_path_factory.mktemp("many"), request.param
    ranks = [[__file__, folder, out, rank, world] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    return out


def saved(folder, kind):
    """All tensors of a kind, whole, of whichever ranks wrote them."""
    files = [file for file in folder.iterdir() if re.fullmatch(rf"{kind}(-\d+-of-\d+)?\.safetensors", file.name)]
    assert files
    return {name: one.read((0,) * len(one.shape), one.shape) for name, one in saved_tensors(files).items()}


@pytest.mark.parametrize("case", ["plain", "alone", "critic", "adapters", "skipping"])
def test_several_ranks_score_and_train_as_one(alone, together, case):
    one, many = (load_file(str(out / f"{case}.safetensors")) for out in (alone, together))
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.parametrize(
    "file",
    [
        "plain-saved/moments",
        "plain-saved/parameters",
        "plain-final/model",
        "critic-saved/critic",
        "critic-saved/critic_moments",
        "adapters-saved/adapter.solver",
        "adapters-saved/adapter.critic.moments",
    ],
)
def test_several_ranks_write_the_tensors_of_one(alone, together, file):
    one, many = (saved((out / file).parent, Path(file).name) for out in (alone, together))
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in many.items()}


def test_ranks_fail_together_and_name_the_sample(together):
    errors = {file.read_text() for file in together.glob("broken-error-*")}
    assert len(errors) == 1
    (error,) = errors
    assert "TRN95" in error
    assert "main/0-0" in error


def test_ranks_train_one_critic_between_them(alone, together):
    one, many = (saved(out / "critic-saved", "critic") for out in (alone, together))
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}")
    metrics = load_file(str(together / "critic.safetensors"))
    assert metrics["metric.1.value_loss"] > 0
    assert metrics["score.values"].abs().max() > 0


def test_ranks_skip_together_and_one_of_them_writes_the_samples(alone, together):
    for out in (alone, together):
        rows = [json.loads(line) for line in (out / "skipping-errors" / "nonfinite.jsonl").read_text().splitlines()]
        assert [row["samples"] for row in rows] == [["main/0-0"]] * 2
    metrics = load_file(str(together / "skipping.safetensors"))
    assert (metrics["metric.0.skipped_steps/nonfinite"], metrics["metric.0.optimizer_steps"]) == (1.0, 1.0)


def test_a_rank_with_another_batch_is_named_by_all(together):
    errors = [file.read_text() for file in sorted(together.glob("divergent-error-*"))]
    world = len(errors)
    assert world > 1
    for error in errors:
        assert error.startswith(f"TRN106 ranks [{world - 1}] of {world}")


if __name__ == "__main__":
    one_thread = TorchThread(1)
    for name in CASES:
        train_rank(name, Path(sys.argv[1]), Path(sys.argv[2]), one_thread, int(sys.argv[3]), int(sys.argv[4]))
    one_thread.close()
