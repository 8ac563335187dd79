"""State in host memory: the bits of a run without it, on one rank and on two; saved in one place, resumed in the other."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_bench as made
from torch.utils.checkpoint import checkpoint

from slime_core.algorithms.shared.terms import role_columns
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer, places
from slime_core.trainers.fsdp.host_inputs import HostInputs
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cpu")  # tests/gpu has the ranks on GPUs
KINDS: dict = {"float32": {}, "bfloat16": {}, "8bit": {"dtype": "float32", "optimizer": "adamw_8bit"}}
PLACES: dict = {"device": {}, "host": {"fsdp_cpu_offload": True, "activation_offload": True}}
SETTINGS = {
    "max_tokens_per_gpu": 60, "num_steps_per_rollout": 2, "kl_loss_coef": 0.05, "advantage_estimator": "ppo",
    "critic_lr": 1e-3, "clip_grad": 0.05, "weight_decay": 0.1, "gradient_checkpointing": True,
}  # fmt: skip


class Rank:
    """One rank's trainer with a critic and a reference; on a GPU with kernels whose gradients repeat bit for bit."""

    def __init__(self, folder: Path, out: Path, thread: TorchThread, rank: int, world: int, **settings) -> None:
        config = made.config_of(folder, **SETTINGS, **settings, true_on_policy_mode=DEVICE == "cuda")
        trainer = FsdpTrainer(
            config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
            rendezvous=out / "meet" if world > 1 else None, device=DEVICE,
        )  # fmt: skip
        self.worker, self.thread = trainer._worker, thread
        self.call("begin", config)
        for learner in self.worker.learners():
            assert isinstance(learner.optimizer.place, places.HostPlace) is bool(config.train.fsdp_cpu_offload)

    def call(self, method, *args):
        return self.thread.call(getattr(self.worker, method), *args)

    def step(self):
        """The checksum of what a step makes of the policy and the critic."""
        batch = made.batch_of(groups=2)
        batch.columns |= role_columns(self.call("score", batch, frozenset({"policy", "reference", "values"})))
        batch.columns["returns"] = np.cos(np.arange(len(batch.loss_mask), dtype=np.float32))
        metrics = self.call("step", batch)
        assert metrics["optimizer_steps"] == 2
        assert metrics["grad_norm"] > SETTINGS["clip_grad"]
        if self.worker.train.fsdp_cpu_offload:
            for learner in self.worker.learners():
                assert {tensor.device.type for tensor in learner.states()} == {"cpu"}
                assert all(tensor.is_pinned() == (DEVICE == "cuda") for tensor in learner.states())
        return self.call("fingerprint")

    def save(self, path):
        self.call("save", path)
        self.worker.staging.wait()
        self.call("barrier")


def train_rank(
    folder: Path, out: Path, thread: TorchThread, rank: int = 0, world: int = 1, kinds: tuple[str, ...] = (*KINDS,)
) -> dict[str, list[str]]:
    """Checksums of two steps by kind and place, and of the second after a resume in the other place."""
    places.WINDOW, places.BLOCK = 4096, 1 << 14
    sums = {}
    for kind in kinds:
        settings = {"dtype": kind, **KINDS[kind]}
        both = {name: Rank(folder, out, thread, rank, world, **settings, **PLACES[name]) for name in PLACES}
        for name, one in both.items():
            steps = [one.step()]
            one.save(out / f"{kind}-{name}")
            sums[f"{kind}-{name}"] = [*steps, one.step()]
        for one, other in zip(both.values(), reversed(both)):
            one.call("restore", out / f"{kind}-{other}")
            sums[f"{kind}-{other}-resumed"] = [one.step()]
    return sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture(
    scope="module",
    params=[(1, (*KINDS,)), (2, ("bfloat16",)), pytest.param((2, (*KINDS,)), marks=pytest.mark.nightly)],
    ids=["1_rank", "2_ranks", "2_ranks_every_kind"],
)
def sums(request, folder, zygote, tmp_path_factory):
    """By kind and place, as every rank has them."""
    out, (world, kinds) = tmp_path_factory.mktemp("out"), request.param
    ranks = [[__file__, folder, out, rank, world, *kinds] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    every = [json.loads((out / f"sums-{rank}.json").read_text()) for rank in range(world)]
    assert all(one == every[0] for one in every)
    return {
        kind: {name.removeprefix(f"{kind}-"): each for name, each in every[0].items() if kind in name}
        for kind in kinds
    }


def test_weights_have_the_bits_of_a_run_without_offload(sums):
    for kind, steps in sums.items():
        assert steps["host"] == steps["device"], kind
        assert len(set(steps["host"])) == 2, kind


@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_of_one_place_resumes_in_the_other(sums, name):
    for kind, steps in sums.items():
        assert steps[f"{name}-resumed"] == steps[name][1:], kind


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


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fused_layers"),
        pytest.param({"fused": False}, id="layers_of_transformers"),
        pytest.param({"gradient_checkpointing_layers": 1}, id="some_layers"),
        pytest.param({"true_on_policy_mode": True}, id="the_engines_kernels"),
    ],
)
def test_inputs_that_wait_on_the_host_leave_every_gradient_as_it_is(bench, settings):
    fused, settings = settings.get("fused", True), {k: v for k, v in settings.items() if k != "fused"}
    one = bench(max_tokens_per_gpu=64, gradient_checkpointing=True, activation_offload=True, **settings)
    policy, batch = one.worker.policy, made.batch_of()
    policy.fused &= fused
    saved = recorded(policy.host_inputs)
    loss, gradients = one.gradient(batch)
    policy.host_inputs = None
    same_loss, want = one.gradient(batch)
    assert loss == same_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, want[name]), name
    assert saved


def recorded(inputs):
    """What is saved from here on."""
    saved, save = [], inputs._save

    def record(tensor):
        saved.append(save(tensor))
        return saved[-1]

    inputs._save = record
    return saved


def test_inputs_leave_the_device_and_come_back_one_ahead():
    inputs, layers = HostInputs(torch.device("cpu")), [torch.nn.Linear(8, 8) for _ in range(4)]
    saved, back = recorded(inputs), []

    def layer(number, x):
        back.append([one.tensor is not None for one in saved])
        return layers[number](x).tanh()

    x = torch.randn(3, 8, requires_grad=True)
    out = x
    for number in range(4):
        with inputs.of(out):
            out = checkpoint(layer, number, out, use_reentrant=False)
    assert [tuple(one.like.shape) for one in saved] == [(3, 8)] * 4
    assert not any(one.tensor is not None for one in saved)
    back.clear()
    out.sum().backward()
    assert back == [[False, False, True, True], [False, True, True, True], [True] * 4, [True] * 4]
    want = torch.autograd.grad(_stack(layers, x).sum(), x)[0]
    assert torch.equal(x.grad, want)


def _stack(layers, x):
    for layer in layers:
        x = layer(x).tanh()
    return x


if __name__ == "__main__":
    one_thread = TorchThread(1)
    folder_, out_, rank_, world_, *kinds_ = sys.argv[1:]
    found = train_rank(Path(folder_), Path(out_), one_thread, int(rank_), int(world_), tuple(kinds_) or (*KINDS,))
    Path(out_, f"sums-{rank_}.json").write_text(json.dumps(found))
    one_thread.close()
