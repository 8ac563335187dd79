"""SGLang on a GPU: the engine's contract, every transport that one GPU has, the exact canary, samples bit for bit.

One server of a 0.6B shape serves all of it, deterministic and with the memory saver.
"""

import asyncio
import json

import numpy as np
import pytest
import torch

from slime_core.clusters.colocation import MemorySwapping
from slime_core.errors import EngineError
from slime_core.plugins import load_plugins
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.threads import TorchThread
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import GenerateRequest, Group, Prompt, Sample, SamplingParams, Status, WeightUpdate
from slime_core.weights.folder import ModelFolder
from slime_core.weights.update import sync_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]

BAND = 0.05  # mean difference of log-probs, bfloat16 on both sides


def requests(count, label, *, length=48):
    rng = np.random.default_rng(7)
    return [
        GenerateRequest(
            id=f"{label}-{index}-x",
            tokens=rng.integers(3, 500, int(rng.integers(5, 90))).tolist(),
            params=SamplingParams(max_new_tokens=length, ignore_eos=True),
            seed=index,
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def version():
    """Versions go up over the module: a server stamps what it is told, and the engine takes no older one."""
    count = iter(range(1, 1000))
    return lambda: next(count)


@pytest.fixture(scope="module")
def thread():
    one = TorchThread(4)
    yield one
    one.close()


@pytest.fixture(scope="module")
def trainer(served, folder, thread, loop):
    config = served.config
    one = FsdpTrainer(
        config, load_plugins(config), ModelFolder.open(folder), thread=thread, device=served.device, epoch=1
    )
    loop.run(one.begin(config))
    return one


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_contract(check, served, folder, loop):
    """All promises, over the disk transport; the first check needs an engine without weights, and comes first."""

    def update(number):
        return WeightUpdate(version=number, epoch=1, transport="disk", handle={"folder": str(folder)})

    loop.run(asyncio.wait_for(check(EngineCase(engine=served.engine, update=update, prompt=[3, 4, 5])), 120))


@pytest.fixture
def loaded(served, folder, loop):
    """The folder's weights are served, where nothing is yet."""
    if served.engine.version < 0:
        update = WeightUpdate(version=1, epoch=1, transport="disk", handle={"folder": str(folder)})
        loop.run(served.engine.load(update))


def test_samples_repeat_bit_for_bit_and_neighbours_change_nothing(served, loaded, loop):
    """The same requests at once, again in another order, and a few of them alone: tokens and log-probs are equal."""

    async def run():
        asked = requests(64, "d")

        async def all_of(some):
            done = await asyncio.gather(*(served.engine.generate(request) for request in some))
            return {out.id: (list(out.tokens), list(map(float, out.log_probs))) for out in done}

        first = await all_of(asked)
        again = await all_of(asked[::-1])
        few = await all_of(asked[::9])
        return first, again, few

    first, again, few = loop.run(asyncio.wait_for(run(), 120))
    assert again == first
    assert few == {name: first[name] for name in few}
    assert len({tuple(tokens) for tokens, _ in first.values()}) == len(first), "seeds change nothing"


def test_tensors_arrive_by_cuda_ipc_and_every_checksum_is_the_trainers(served, trainer, loop, version):
    """Checksums of all tensors, SGLang's on the GPU against ours; then plain log-probs of both."""

    async def run():
        route = await served.engine.route("all")
        assert route is not None
        assert route.transport == ("tensor" if served.device == "cuda" else "disk")
        assert route.checksum == ("murmur" if served.device == "cuda" else "sha256")
        number = 100 + version()
        await sync_weights(trainer, served.engine, number, check="all")
        assert served.engine.version == number
        return await log_prob_difference(served, trainer)

    assert loop.run(asyncio.wait_for(run(), 120)) < BAND


async def log_prob_difference(served, trainer):
    """Mean absolute difference of the engine's plain log-probs to its own score, and to the trainer's."""
    asked = requests(8, "s", length=32)
    done = await asyncio.gather(*(served.engine.generate(request) for request in asked))
    plain = [np.asarray(out.plain_log_probs, np.float32) for out in done]
    groups, found = [], []
    for position, (request, out) in enumerate(zip(asked, done, strict=True)):
        scored = await served.engine.score([*request.tokens, *out.tokens], len(request.tokens))
        found.append(np.abs(scored - plain[position]))
        sample = Sample(id=f"main/{position}-0", tokens=list(request.tokens), group_index=position, reward=0.0)
        sample.append_response(out.tokens, out.log_probs, version=0)
        sample.status = Status.COMPLETED
        prompt = Prompt(id=f"main/{position}", position=position)
        groups.append(Group(prompt=prompt, samples=[sample], rollouts={position: [0]}))
    columns = await trainer.score(make_batch(0, "main", groups), frozenset({"policy"}))
    found.append(np.abs(columns["policy"]["log_probs"] - np.concatenate(plain)))
    return float(np.mean(np.concatenate(found)))


def test_a_changed_weight_is_named_by_the_exact_canary(served, trainer, loop, version):
    """Case: a tensor of the trainer that never reached the engine."""

    async def run():
        number = 200 + version()
        await sync_weights(trainer, served.engine, number, check="all")
        route = await served.engine.route("all")
        update = await trainer.publish(number + 1, route)
        name = next(key for key in update.fingerprints if key.endswith("layers.1.mlp.down_proj.weight"))
        with torch.no_grad():
            trainer._worker.actor.locals()["model.layers.1.mlp.down_proj.weight"].view(-1)[5] += 1.0
        later = await trainer.publish(number + 2, route)
        assert [key for key in later.fingerprints if later.fingerprints[key] != update.fingerprints[key]] == [name]
        publish = trainer.publish

        async def stale(wanted, route=None):
            """The engine gets the new weights and is compared with the old ones."""
            made = await publish(wanted, route)
            made.fingerprints = dict(update.fingerprints)
            return made

        trainer.publish = stale
        try:
            with pytest.raises(EngineError, match=r"layers\.1\.mlp\.down_proj\.weight") as caught:
                await sync_weights(trainer, served.engine, number + 3, check="all")
        finally:
            trainer.publish = publish
        assert caught.value.code == "ENG83"
        await sync_weights(trainer, served.engine, number + 4, check="all")

    loop.run(asyncio.wait_for(run(), 120))


def test_a_folder_arrives_by_disk_and_gives_the_same_samples(served, place, folder, trainer, loop, version, tmp_path):
    """Another engine, attached to the same server, with the other transport: the bytes are the same."""
    module, found = place
    flags = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "weights"))
    same = ("--dtype", served.config.train.dtype)
    config = found.config(folder, "--rollout-external-engine-addrs", served.url, *same, *flags)

    async def run():
        await sync_weights(trainer, served.engine, 300 + version(), check="all")
        want = [list((await served.engine.generate(request)).tokens) for request in requests(4, "k")]
        async with module.serving(config, tmp_path / "run", token=served.token) as other:
            route = await other.engine.route("all")
            assert route is not None
            assert route.transport == "disk"
            await sync_weights(trainer, other.engine, 300 + version(), check="all")
            got = [list((await other.engine.generate(request)).tokens) for request in requests(4, "k")]
        await sync_weights(trainer, served.engine, 300 + version(), check="all")
        return want, got

    want, got = loop.run(asyncio.wait_for(run(), 240))
    assert got == want or "per_sample_seed" not in served.engine.abilities


def test_engine_and_trainer_swap_the_gpus_memory(served, trainer, loop, version):
    """What the engine gives is free for the trainer, a request in flight lives through it, samples are as before."""

    def free():
        return torch.cuda.mem_get_info()[0]

    async def run():
        devices = MemorySwapping(served.engine, trainer, free=free if served.device == "cuda" else None)
        await sync_weights(trainer, served.engine, 400 + version(), check="all")
        want = [list((await served.engine.generate(request)).tokens) for request in requests(4, "m")]
        running = asyncio.create_task(served.engine.generate(requests(1, "flight", length=400)[0]))
        await asyncio.sleep(0.3)
        async with devices.training():
            lent = free() if served.device == "cuda" else 0
        async with devices.syncing():
            await sync_weights(trainer, served.engine, 400 + version(), check="all")
        got = [list((await served.engine.generate(request)).tokens) for request in requests(4, "m")]
        flown = await asyncio.wait_for(running, 60)
        return want, got, flown, lent, dict(devices.metrics)

    want, got, flown, lent, metrics = loop.run(asyncio.wait_for(run(), 240))
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}, indent=1))
    assert len(flown.tokens) == 400
    assert metrics["swap/total_seconds"] > 0
    if served.device == "cpu":
        return
    assert got == want
    assert metrics["swap/engine_release_bytes"] > 5e9, "the KV cache did not come free"
    assert metrics["swap/engine_kv_bytes"] > 5e9
    assert lent > metrics["swap/engine_release_bytes"]


def test_an_update_reaches_requests_in_flight(served, trainer, loop, version):
    """Tokens of both versions in one sample, in order; nothing is lost or made twice."""

    async def run():
        await trainer.reacquire({"parameters"})  # another test's turn may have taken them
        before = 500 + version()
        await sync_weights(trainer, served.engine, before, check="rolling")
        asked = requests(16, "live", length=300)
        running = [asyncio.create_task(served.engine.generate(request)) for request in asked]
        await asyncio.sleep(1.0)
        after = 500 + version()
        await sync_weights(trainer, served.engine, after, check="rolling")
        return before, after, await asyncio.gather(*running)

    before, after, done = loop.run(asyncio.wait_for(run(), 120))
    assert {len(out.tokens) for out in done} == {300}
    assert all(list(out.versions) == sorted(out.versions) for out in done)
    assert {version for out in done for version in out.versions} == {before, after}
