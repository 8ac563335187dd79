"""Ranks behind a driver are sent their own samples, and score and train as one rank that has them all."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import trainer_bench as made
from forked_channel import start_forked

from slime_core.algorithms.shared.terms import role_columns
from slime_core.clusters.channel import ProcessChannel, decode, encode
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.schema import Config
from slime_core.errors import TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

ON_CPU = Path(__file__).parents[3] / "plugins" / "slime_megatron" / "tests" / "megatron_on_cpu"
ROLES = frozenset({"policy", "reference"})
TRAIN = {"dtype": "float32", "lr": 1e-3, "adam_eps": 1e-3, "kl_loss_coef": 0.05, "num_steps_per_rollout": 2}


class Counting(ProcessChannel):
    """A channel that keeps the frames it has sent."""

    def __init__(self, *given):
        super().__init__(*given)
        self.sent = []

    async def write(self, frame):
        self.sent.append(frame)
        await super().write(frame)

    def of(self, method):
        """The frame of the first call of this method."""
        return next(frame for frame in self.sent if decode(frame).get("method") == method)


def size(frame):
    return len(frame.head) + sum(map(len, frame.blobs))


def batch_of():
    return made.batch_of(groups=8, rollouts=4, longest=40)


async def trained(model, run_dir, plugins=(), megatron=None, **train):
    """What two ranks scored, the metrics of a step, and their channels."""
    channels = []

    async def start(number, child):
        forks = train.get("train_backend") != "megatron"  # which wants a Python of its own
        channels.append(await (start_forked(number, child, Counting) if forks else Counting.start(child)))
        return channels[-1]

    given = {"rollout": {"hf_checkpoint": str(model)}, "train": {**TRAIN, **train}, "plugins": plugins, "seed": 3}
    given["cluster"] = {"device": "cpu", "cpu_threads": 1}
    config = Config.model_validate(given | {"megatron": megatron or {}})
    ranks = RankTrainer(config, load_plugins(config), world=2, run_dir=run_dir, start=start)
    async with ranks:
        await ranks.begin(config)
        batch = batch_of()
        scored = role_columns(await ranks.score(batch, ROLES))
        batch.columns |= scored
        return scored, await ranks.step(batch), channels, batch, await bad(ranks)


async def bad(ranks):
    """The error for a token that is outside the vocabulary, in the rank batch of one rank; the ranks live on."""
    batch = batch_of()
    batch.tokens[-1] = 10_000
    with pytest.raises(TrainerError) as caught:
        await ranks.score(batch, ROLES)
    assert (await ranks.score(batch_of(), ROLES)).keys() == ROLES
    return caught.value, batch.sample_ids[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", hidden=16)


def test_two_ranks_get_half_the_bytes_each_and_train_as_one(model, tmp_path):
    scored, metrics, channels, batch, (error, sample) = asyncio.run(trained(model, tmp_path))
    whole = size(encode({"method": "step", "args": [batch]}))
    sent = [size(channel.of("step")) for channel in channels]
    assert max(sent) < 0.65 * whole
    assert sum(sent) < 1.2 * whole
    assert (error.code, sample in error.what) == ("TOK44", True)
    one = made.Bench(model, **{name: value for name, value in TRAIN.items() if name != "dtype"})
    batch = batch_of()
    batch.columns |= role_columns(one.call("score", batch, ROLES))
    for role, values in scored.items():
        np.testing.assert_allclose(values, batch.columns[role], atol=2e-5)
    want = one.call("step", batch)
    one.thread.close()
    assert metrics.keys() == want.keys()
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


@pytest.mark.nightly
def test_ranks_that_hold_a_tensor_together_get_the_same_frame_put_once(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ON_CPU), os.getenv("PYTHONPATH")])))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    flags = {"tensor_model_parallel_size": 2}
    found = asyncio.run(trained(model, tmp_path, ("models",), flags, train_backend="megatron"))
    scored, metrics, (first, second), batch, (error, _) = found
    for method in ("score", "step"):
        assert first.of(method) is second.of(method)
    assert decode(first.of("step"))["args"][0].places.tolist() == list(range(len(batch)))
    assert error.code == "TOK44"
    assert metrics["optimizer_steps"] == 2
    assert scored["policy"].std() > 0
