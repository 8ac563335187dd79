"""The real router of SGLang before servers of this process that speak SGLang's wire: whom it asks, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_case import EPOCH, request, routed, update
from fake_sglang import TOKEN, FakeServer

from slime_core.backends import EngineStart
from slime_core.config.load import load_config
from slime_core.errors import EngineError
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Media
from slime_core.weights.folder import ModelFolder
from slime_sglang import held_ports as ports
from slime_sglang.gateway_router import GatewayRouter
from slime_sglang.host import Launch
from slime_sglang.http import fault
from slime_sglang.installation import read_installation
from slime_sglang.pictures import PictureCodec
from slime_sglang.ports import router_launch
from slime_sglang.router_options import router_arguments
from slime_sglang.start import sglang_engines

pytestmark = pytest.mark.system

LONG = 55.0
Program = Callable[..., Launch]


@pytest.fixture
def program(sglang_python: str, tmp_path: Path) -> Program:
    """How a run would start the router, with flags of its own."""

    def of(*flags: str, paired: bool = False) -> Launch:
        installation = read_installation(sglang_python, {})
        assert installation.router, "sglang-router of constraints-sglang.txt is not installed there"
        config = load_config(None, ["--rollout-engine", "sglang", *flags])
        words = router_arguments(config, installation, paired=paired)
        log = tmp_path / "log" / "gateway.log"
        return router_launch(python=sglang_python, arguments=words, env={}, log=log)

    return of


def run(work: Awaitable[Any]) -> None:
    """Within the time that a test has."""

    async def bounded() -> None:
        await asyncio.wait_for(work, LONG)

    asyncio.run(bounded())


def test_prompts_that_begin_alike_are_not_all_sent_to_one_server(program: Program, tmp_path: Path) -> None:
    """With the thresholds that slime sets; SGLang's own let one server have 64 requests more."""

    async def work() -> None:
        async with routed(tmp_path, 2, program=program()) as on:
            await on.engine.load(update(tmp_path, 1))
            for fake in on.fakes:
                fake.hold = True
            tasks = [asyncio.create_task(on.engine.generate(request(f"p{n}-0"))) for n in range(40)]
            while sum(len(fake.running) for fake in on.fakes) < 40:
                await asyncio.sleep(0.001)
            assert min(len(fake.running) for fake in on.fakes) >= 10
            for fake in on.fakes:
                fake.go.set()
            assert all(len(one.tokens) == 6 for one in await asyncio.gather(*tasks))

    run(work())


def test_a_session_stays_on_its_server_where_the_policy_is_manual(program: Program, tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(tmp_path, 2, program=program("--sglang-router-policy", "manual")) as on:
            await on.engine.load(update(tmp_path, 1))
            for turn in range(6):
                await on.engine.generate(request(f"t-{turn}", session_id="a conversation"))
            assert sorted(len(fake.bodies) for fake in on.fakes) == [0, 6]

    run(work())


def test_the_router_asks_once_a_try_and_hands_a_servers_words_on(program: Program, tmp_path: Path) -> None:
    """Its own retries are off: a repeat is ours, once the try before is over."""

    async def work() -> None:
        async with routed(tmp_path, 1, program=program()) as on:
            await on.engine.load(update(tmp_path, 1))
            fake = on.fakes[0]
            fake.fails, asked = 2, len(fake.rids)
            assert len((await on.engine.generate(request("a-0"))).tokens) == 6
            assert len(fake.rids) == asked + 3
            assert len(set(fake.rids)) == len(fake.rids), "each try is one of ours, under a name of its own"
            fake.fails = 100
            with pytest.raises(EngineError, match="out of luck") as caught:
                await on.engine.generate(request("a-1"))
            assert caught.value.code == "ENG75"

    run(work())


def test_every_parameter_reaches_the_server_as_slime_sent_it(program: Program, tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(tmp_path, 1, program=program()) as on:
            await on.engine.load(update(tmp_path, 1))
            await on.engine.generate(request("a-0"))
            (body,) = on.fakes[0].bodies
            assert body["sampling_params"] == {
                "max_new_tokens": 6,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "min_new_tokens": 0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,
                "skip_special_tokens": True,
                "no_stop_trim": False,
                "n": 1,
                "sampling_seed": 11,
            }
            assert body["input_ids"] == [5, 6, 7]
            assert body["rid"].endswith("-a-0")
            assert body["return_logprob"] is True
            assert body["logprob_start_len"] == -1
            assert body["stream"] is False

    run(work())


def test_a_fenced_server_gets_nothing_more_until_it_is_let_in_again(program: Program, tmp_path: Path) -> None:
    async def work() -> None:
        async with routed(tmp_path, 2, program=program("--sglang-router-policy", "round_robin")) as on:
            await on.engine.load(update(tmp_path, 1))
            lane = on.engine.router.fence(1, fault("gone", "ENG84", ""))
            for number in range(6):
                await on.engine.generate(request(f"a-{number}"))
            assert [len(fake.bodies) for fake in on.fakes] == [6, 0]
            lane.fenced = None
            await on.engine.router.join(lane)
            for number in range(6):
                await on.engine.generate(request(f"b-{number}"))
            assert [len(fake.bodies) for fake in on.fakes] == [9, 3]

    run(work())


def test_a_prefill_and_a_decode_server_are_asked_together(program: Program, tmp_path: Path) -> None:
    """Both with one room number, and the port on which they meet; the answer is the decode server's."""

    async def work() -> None:
        async with routed(tmp_path, kinds=("prefill", "decode"), program=program(paired=True)) as on:
            await on.engine.load(update(tmp_path, 1))
            done = await on.engine.generate(request("a-0"))
            assert len(done.tokens) == 6
            bodies = [fake.bodies[-1] for fake in on.fakes]
            assert bodies[0]["bootstrap_room"] == bodies[1]["bootstrap_room"]
            assert {body["bootstrap_port"] for body in bodies} == {8123}
            assert {body["rid"] for body in bodies} == {bodies[0]["rid"]}

    run(work())


def test_pictures_reach_every_server_that_computes_with_them(program: Program, tmp_path: Path) -> None:
    """One server, and a prefill server with a decode server; 3 placeholders go out as one id."""
    folder = ModelFolder.open(tiny_vision_model(tmp_path / "model", weights=False), init_weights="random")
    codec, pad = PictureCodec.of(folder), folder.config.image_token_id
    assert codec is not None
    pixels = np.random.default_rng(0).standard_normal((12, 1176), dtype=np.float32)
    media = Media(arrays={"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, 6]])})
    with_pictures = replace(request("a-0"), tokens=[5, pad, pad, pad, 6], media=media)

    async def work(kinds: tuple[str, ...]) -> None:
        launched, where = program(paired=len(kinds) > 1), tmp_path / str(len(kinds))
        where.mkdir()
        async with routed(where, kinds=kinds, program=launched, pictures=codec) as on:
            await on.engine.load(update(where, 1))
            for fake in on.fakes:
                fake.prompt = lambda body: with_pictures.tokens
            assert len((await on.engine.generate(with_pictures)).tokens) == 6
            sent = await codec.fields(with_pictures.tokens, media, "")
            for fake in on.fakes:
                assert fake.bodies[-1]["input_ids"] == [5, pad, 6]
                assert fake.bodies[-1]["image_data"] == sent["image_data"]

    run(work(("null",)))
    run(work(("prefill", "decode")))


def test_servers_of_others_have_the_router_where_it_is_asked_for(
    sglang_python: str, served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a run: addresses in, an engine behind the router out, and nothing left when it ends."""
    monkeypatch.setenv("SLIME_SGLANG_TOKEN", TOKEN)
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", sglang_python)

    async def work() -> None:
        opened = ModelFolder.open(served_model)
        async with FakeServer(version="default") as one, FakeServer(version="default") as other:
            one.ids = other.ids = opened.vocab_size
            one.encode = other.encode = opened.tokenizer().encode
            words = ["--hf-checkpoint", str(served_model), "--rollout-engine", "sglang", "--rollout-router", "sglang"]
            words += ["--device", "cpu", "--dtype", "float32"]
            words += ["--rollout-external-engine-addrs", f'["{one.url}", "{other.url}"]']
            notes: list[str] = []
            config = load_config(None, words)
            start = EngineStart(config=config, folder=opened, run_dir=tmp_path, epoch=EPOCH, note=notes.append)
            async with sglang_engines(start) as served:
                router = served.engine.router
                assert isinstance(router, GatewayRouter)
                gateway = router._gateway
                assert {worker["url"] for worker in await gateway._list_workers()} == {one.url, other.url}
                assert any("SGLang's router" in note for note in notes), notes
                session = gateway.process.pid
                assert ports.members(session)
            assert not ports.members(session)
            assert (tmp_path / "log" / "gateway.log").exists()

    run(work())
