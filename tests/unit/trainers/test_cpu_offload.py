"""State in host memory: the bits of a run without it, on one rank and on two; saved in one place, resumed in the other."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_bench as made

from slime_core.algorithms.shared.terms import role_columns
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer, places
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

DTYPES = ("float32", "bfloat16")
PLACES = {"device": {}, "host": {"fsdp_cpu_offload": True}}
SETTINGS = {
    "max_tokens_per_gpu": 40, "num_steps_per_rollout": 2, "kl_loss_coef": 0.05, "advantage_estimator": "ppo",
    "critic_lr": 1e-3, "clip_grad": 0.05, "weight_decay": 0.1,
}  # fmt: skip


class Rank:
    """One rank's trainer with a critic and a reference."""

    def __init__(self, folder: Path, out: Path, thread: TorchThread, rank: int, world: int, **settings) -> None:
        config = made.config_of(folder, **SETTINGS, **settings)
        trainer = FsdpTrainer(
            config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
            rendezvous=out / "meet" if world > 1 else None,
        )  # fmt: skip
        self.worker, self.thread = trainer._worker, thread
        self.call("begin", config)
        for learner in self.worker.learners():
            assert isinstance(learner.optimizer.place, places.HostPlace) is config.train.fsdp_cpu_offload

    def call(self, method, *args):
        return self.thread.call(getattr(self.worker, method), *args)

    def step(self):
        """The checksum of what a step makes of the policy and the critic."""
        batch = made.batch_of()
        batch.columns |= role_columns(self.call("score", batch, frozenset({"policy", "reference", "values"})))
        batch.columns["returns"] = np.cos(np.arange(len(batch.loss_mask), dtype=np.float32))
        metrics = self.call("step", batch)
        assert metrics["optimizer_steps"] == 2
        assert metrics["grad_norm"] > SETTINGS["clip_grad"]
        return self.call("fingerprint")

    def save(self, path):
        self.call("save", path)
        self.worker.staging.wait()
        self.call("barrier")


def train_rank(folder: Path, out: Path, thread: TorchThread, rank: int = 0, world: int = 1) -> dict[str, list[str]]:
    """Checksums of four steps by dtype and place, and of the fourth after a resume in the other place."""
    places.WINDOW, places.BLOCK = 4096, 1 << 14
    sums = {}
    for dtype in DTYPES:
        for name, settings in PLACES.items():
            one = Rank(folder, out, thread, rank, world, dtype=dtype, **settings)
            steps = [one.step() for _ in range(3)]
            one.save(out / f"{dtype}-{name}")
            sums[f"{dtype}-{name}"] = [*steps, one.step()]
        for name, other in zip(PLACES, reversed(PLACES)):
            one = Rank(folder, out, thread, rank, world, dtype=dtype, **PLACES[name])
            one.call("restore", out / f"{dtype}-{other}")
            sums[f"{dtype}-{other}-resumed"] = [one.step()]
    return sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture(scope="module", params=[1, 2], ids="{}_ranks".format)
def sums(request, folder, zygote, tmp_path_factory):
    out, world = tmp_path_factory.mktemp("out"), request.param
    ranks = [[__file__, folder, out, rank, world] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    every = [json.loads((out / f"sums-{rank}.json").read_text()) for rank in range(world)]
    assert all(one == every[0] for one in every)
    return every[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_have_the_bits_of_a_run_without_offload(sums, dtype):
    assert sums[f"{dtype}-host"] == sums[f"{dtype}-device"]
    assert len(set(sums[f"{dtype}-host"])) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_of_one_place_resumes_in_the_other(sums, dtype, name):
    assert sums[f"{dtype}-{name}-resumed"] == sums[f"{dtype}-{name}"][3:]


def test_windows_hold_few_bytes_and_give_back_what_changed(monkeypatch):
    monkeypatch.setattr(places, "WINDOW", 400)
    monkeypatch.setattr(places, "BLOCK", 1000)
    draw = torch.Generator().manual_seed(0)
    state = {str(n): torch.randn(n, 10, generator=draw) for n in (3, 4, 1, 20, 2, 30)}
    host = places.HostPlace(torch.device("cpu"))
    kept, grads = host.keep(state), {name: torch.ones_like(tensor) for name, tensor in state.items()}
    assert list(kept) == list(state)
    assert all(torch.equal(kept[name], state[name]) for name in state)
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept.values()}
    assert sorted(memory.values()) == [384, 960, 1216]  # 4 + 2 + 1; 20 + 3; 30: whole lines of 64 bytes
    sizes = []
    for names, (values, read) in host.windows(list(kept), (kept,), (grads,)):
        sizes.append([len(values[0]), len(names)])
        for value, grad in zip(values, read):
            value.add_(grad)
            grad.zero_()
    assert sizes == [[3, 3], [20, 1], [2, 1], [30, 1]]
    assert all(torch.equal(kept[name], state[name] + 1) for name in state)
    assert all(grad.eq(1).all() for grad in grads.values())


if __name__ == "__main__":
    one_thread = TorchThread(1)
    folder_, out_, rank_, world_ = sys.argv[1:]
    found = train_rank(Path(folder_), Path(out_), one_thread, int(rank_), int(world_))
    Path(out_, f"sums-{rank_}.json").write_text(json.dumps(found))
    one_thread.close()
