"""A prefill and a decode server on two GPUs behind SGLang's router: tokens, log-probs, weights, aborts, a killed server.

Needs sglang-router and a transfer backend beside SGLang; SLIME_PD_BACKEND names another than nixl. What the pair answers
is compared with one regular server of the same weights, greedily.
"""

import asyncio
import importlib.util
import os
import signal
from contextlib import AsyncExitStack

import pytest
import torch
from safetensors.torch import load_file

from slime_core.backends import EngineStart
from slime_core.clusters.machine import resolve_machine
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.canary import TWIN, compare
from slime_core.weights.folder import ModelFolder
from slime_sglang import held_ports as ports
from slime_sglang.hashing import expected
from slime_sglang.start import sglang_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not proven: needs two GPUs"),
]

BACKEND = os.environ.get("SLIME_PD_BACKEND", "nixl")
FILE = f"""
[[group]]
name = "prefill"
mode = "prefill"
options = {{ disaggregation_transfer_backend = "{BACKEND}" }}

[[group]]
name = "decode"
mode = "decode"
options = {{ disaggregation_transfer_backend = "{BACKEND}" }}
"""
OPTIONS = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True, "mem_fraction_static": 0.3}
LENGTH, TIMEOUT = 48, 240.0


def request(name, length=LENGTH, temperature=0.0, prompt=40):
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=temperature)
    return GenerateRequest(id=name, tokens=list(range(3, 3 + prompt)), params=params, seed=1)


@pytest.fixture(scope="module")
def started(place, folder, loop, tmp_path_factory):
    """Start servers by the flags of a run, with the folder's weights as version 0; all are stopped at the end."""
    _, found = place
    stack = AsyncExitStack()

    def start(*flags):
        run_dir = tmp_path_factory.mktemp("run")
        config = resolve_machine(found.config(folder, "--dtype", "bfloat16", *flags, sglang=OPTIONS))
        opened, notes = ModelFolder.open(folder), []
        start = EngineStart(config=config, folder=opened, run_dir=run_dir, epoch=1, note=notes.append, fixed=True)
        served = loop.run(stack.enter_async_context(sglang_engines(start)))
        return served.engine, notes

    yield start
    loop.run(stack.aclose())


@pytest.fixture(scope="module")
def pair(started, tmp_path_factory):
    """The engine over one prefill and one decode server."""
    if importlib.util.find_spec("sglang_router") is None and not os.environ.get("SGLANG_SITE"):
        pytest.skip("not proven: sglang-router is not installed")
    file = tmp_path_factory.mktemp("servers") / "servers.toml"
    file.write_text(FILE)
    return started("--engine-topology", str(file))


def test_the_pair_answers_as_one_regular_server_does(pair, started, loop):
    """Greedy tokens of both; log-probs within what bfloat16 and another order of sums give."""

    async def ask(engine):
        return await asyncio.wait_for(engine.generate(request("same-0")), TIMEOUT)

    engine, notes = pair
    got = loop.run(ask(engine))
    assert any("SGLang's router" in note for note in notes), notes
    assert got.finish == "length"
    assert got.versions == [0] * LENGTH
    alone, _ = started("--rollout-num-gpus", "1", "--rollout-router", "builtin")
    wanted = loop.run(ask(alone))
    same = sum(a == b for a, b in zip(got.tokens, wanted.tokens, strict=True))
    assert same >= LENGTH - 4, (got.tokens, wanted.tokens)
    if got.tokens == wanted.tokens:
        assert max(abs(a - b) for a, b in zip(got.plain_log_probs, wanted.plain_log_probs, strict=True)) < 0.1


def test_many_requests_come_back_once_each(pair, loop):
    async def work():
        engine, _ = pair
        wanted = [request(f"many-{n}", temperature=1.0, prompt=20 + n) for n in range(64)]
        done = await asyncio.wait_for(asyncio.gather(*map(engine.generate, wanted)), TIMEOUT)
        assert [one.id for one in done] == [one.id for one in wanted]
        assert all(len(one.tokens) == len(one.log_probs) == LENGTH for one in done)

    loop.run(work())


def test_an_abort_ends_a_request_on_both_servers(pair, loop):
    async def work():
        engine, _ = pair
        task = asyncio.create_task(engine.generate(request("ended", 3000)))
        while not engine.requests.served:
            await asyncio.sleep(0.01)
        (ended,) = await asyncio.wait_for(engine.abort(["ended"]), TIMEOUT)
        assert ended.finish == "abort"
        assert (await task).tokens == ended.tokens

    loop.run(work())


def test_both_kinds_hold_the_weights_that_were_sent(pair, folder, loop):
    """Every tensor of both servers, and requests that run meanwhile go on with the new weights."""

    async def work():
        engine, _ = pair
        running = asyncio.create_task(engine.generate(request("goes-on", 1500)))
        while not engine.requests.served:
            await asyncio.sleep(0.01)
        route = await engine.route("all")
        sums = expected(load_file(folder / "model.safetensors"), route.checks, torch.bfloat16, route.checksum)
        handle = {"folder": str(folder)}
        update = WeightUpdate(version=1, epoch=1, transport="disk", handle=handle, fingerprints=sums)
        await asyncio.wait_for(engine.load(update), TIMEOUT)
        held = [check for check in route.checks if TWIN not in check.name]
        assert compare(route.checks, sums, await engine.fingerprints(), 1) == len(held) > 200
        done = await asyncio.wait_for(running, TIMEOUT)
        assert len(done.tokens) == 1500
        assert done.versions == sorted(done.versions)
        assert done.versions[-1] == 1

    loop.run(work())


def test_a_killed_decode_server_comes_back_and_its_requests_are_answered_once(pair, loop):
    async def work():
        engine, notes = pair
        tasks = [asyncio.create_task(engine.generate(request(f"killed-{n}", 1000))) for n in range(8)]
        while engine.requests.served < 8:
            await asyncio.sleep(0.01)
        server = engine.fleet._servers[1]
        for pid in ports.members(server.pid):
            if pid != server.pid:
                os.kill(pid, signal.SIGKILL)
        done = await asyncio.wait_for(asyncio.gather(*tasks), 500)
        assert [one.id for one in done] == [f"killed-{n}" for n in range(8)]
        assert all(len(one.tokens) == 1000 for one in done)
        assert any("serves again" in note for note in notes), notes

    loop.run(work())
