"""Adapters that servers compute beside the base: how versions reach them, which requests use, and what is refused."""

import json

import pytest
from engine_case import EPOCH, begun, request, routed, run, serving, update

from slime_core.config.schema import Config
from slime_core.errors import ConfigError, EngineError
from slime_core.types import WeightUpdate
from slime_sglang import adapters
from slime_sglang.adapters import missing_options
from slime_sglang.rules import conflicts, notices

pytestmark = pytest.mark.unit

NAMES = ("solver", "critic")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}


def sent(tmp_path, number, base, transport="disk", names=NAMES):
    """An update of adapters, with their base where ``base``."""
    where = (
        {"folder": "/adapters"} if transport == "disk" else {"buckets": [{"names": ["x"], "handle": "of a process"}]}
    )
    handle = {"adapters": {name: {"config": CONFIG, **where} for name in names}}
    if base:
        handle |= update(tmp_path, number, transport).handle
    return WeightUpdate(version=number, epoch=EPOCH, transport=transport, handle=handle)


async def synced(engine, tmp_path, number, transport="disk"):
    """An update as a trainer makes it: by the engine's route."""
    route = await engine.route("all")
    await engine.load(sent(tmp_path, number, route.base, transport))
    return route


def of(fake, part):
    """Calls with ``part`` in their paths, with the adapter's name."""
    return [(path, body.get("lora_name")) for path, body in fake.calls if part in path]


@pytest.mark.parametrize(
    ("transport", "load"), [("disk", "/load_lora_adapter"), ("tensor", "/load_lora_adapter_from_tensors")]
)
def test_the_base_crosses_once_and_each_version_of_an_adapter_has_a_name_of_its_own(tmp_path, transport, load):
    async def work():
        async with serving(tmp_path, 2, adapters=NAMES) as (engine, fakes):
            assert "adapters" in engine.abilities
            assert (await synced(engine, tmp_path, 1, transport)).base
            route = await synced(engine, tmp_path, 2, transport)
            assert (route.base, route.checks) == (False, ())
            for fake in fakes:
                assert len([path for path, _ in fake.calls if path.startswith("/update_weights_from")]) == 1
                assert of(fake, "load_lora_adapter")[2:] == [
                    (load, f"solver@{EPOCH}.2"), ("/unload_lora_adapter", f"solver@{EPOCH}.1"),
                    (load, f"critic@{EPOCH}.2"), ("/unload_lora_adapter", f"critic@{EPOCH}.1"),
                ]  # fmt: skip
                assert fake.version == f"{EPOCH}.2"
            done = [await engine.generate(request(f"a-{n}", adapter=name)) for n, name in enumerate(("", *NAMES))]
            await engine.score([1, 2, 3], 1, adapter="critic")
            bodies = [len(fake.bodies) for fake in fakes]
            await engine.generate(request("c-0", adapter="base"))
            (base,) = [body for fake, count in zip(fakes, bodies, strict=True) for body in fake.bodies[count:]]
            assert "lora_path" not in base
            for fake, count in zip(fakes, bodies, strict=True):
                del fake.bodies[count:]
            paths = [body["lora_path"] for fake in fakes for body in fake.bodies]
            assert sorted(paths) == sorted(f"{name}@{EPOCH}.2" for name in ("solver", "solver", "critic", "critic"))
            assert all(one.versions == [2] * 6 for one in done)
            with pytest.raises(EngineError, match="ENG09"):
                await engine.generate(request("b-0", adapter="judge"))

    run(work())


@pytest.mark.parametrize("paused", [False, True], ids=["live", "inside a pause of the run"])
def test_requests_that_run_go_on_with_the_new_version_and_each_token_says_which_made_it(tmp_path, paused):
    async def work():
        async with serving(tmp_path, 1, adapters=NAMES, pause_mode="retract") as (engine, fakes):
            await synced(engine, tmp_path, 1)
            tasks = await begun(engine, fakes, ["a-0"])
            if paused:
                await engine.pause("retract")
            fakes[0].hold = False
            await synced(engine, tmp_path, 2)
            if paused:
                await engine.resume()
            done = await tasks["a-0"]
            assert done.versions == [1, 1, 2, 2, 2, 2]
            assert [body["lora_path"] for body in fakes[0].bodies] == [f"solver@{EPOCH}.1", f"solver@{EPOCH}.2"]

    run(work())


def test_an_update_that_a_server_says_it_took_and_did_not_is_caught_at_once(tmp_path):
    async def work():
        async with serving(tmp_path, 1, adapters=NAMES) as (engine, fakes):
            await synced(engine, tmp_path, 1)
            fakes[0].loses = True
            with pytest.raises(EngineError, match=r"lists none, not critic@3\.2, solver@3\.2") as caught:
                await synced(engine, tmp_path, 2)
            assert caught.value.code == "ENG83"

    run(work())


def test_a_refused_adapter_is_an_error_in_the_server_s_words(tmp_path):
    async def work():
        async with serving(tmp_path, 1, adapters=NAMES) as (engine, fakes):
            await synced(engine, tmp_path, 1)
            fakes[0].refuse = 1
            with pytest.raises(EngineError, match=rf"ENG86.*solver@{EPOCH}\.2 is already loaded"):
                await synced(engine, tmp_path, 2)

    run(work())


def test_a_server_that_comes_back_gets_the_base_again_with_the_adapters(tmp_path):
    async def work():
        async with serving(tmp_path, 2, adapters=NAMES) as (engine, fakes):
            routes = []

            async def source(route):
                routes.append(route)
                return sent(tmp_path, 2, route.base)

            engine.fleet.source = source
            await synced(engine, tmp_path, 1)
            await synced(engine, tmp_path, 2)
            engine.fleet.fence(1, EngineError("gone", code="ENG69"))
            fakes[1].adapters.clear()
            fakes[1].calls.clear()
            await engine.fleet.bring_up(1)
            assert [route.base for route in routes] == [True]
            assert "/update_weights_from_disk" in fakes[1].paths()
            assert set(fakes[1].adapters) == {f"solver@{EPOCH}.2", f"critic@{EPOCH}.2"}
            assert not (await synced(engine, tmp_path, 3)).base

    run(work())


@pytest.mark.parametrize("backup", [False, True])
def test_the_base_crosses_again_after_its_memory_was_given_back_unless_the_server_keeps_a_copy(tmp_path, backup):
    async def work():
        async with serving(tmp_path, 1, adapters=NAMES, memory_saver=True) as (engine, _):
            engine.router.lanes[0].facts = {"enable_weights_cpu_backup": backup}
            await synced(engine, tmp_path, 1)
            await engine.release({"kv"})
            await engine.reacquire({"kv"})
            assert not (await engine.route("all")).base
            await engine.release({"kv", "weights"})
            await engine.reacquire({"weights"})
            assert (await synced(engine, tmp_path, 2)).base is not backup

    run(work())


def test_a_reserved_server_keeps_its_version_of_the_adapters(tmp_path):
    async def work():
        async with serving(tmp_path, 2, adapters=NAMES) as (engine, fakes):
            await synced(engine, tmp_path, 1)
            async with engine.reserve() as server:
                await synced(engine, tmp_path, 2)
                assert (await server.generate(request("eval/a-0", adapter="critic"))).versions == [1] * 6
                assert (await engine.generate(request("a-0"))).versions == [2] * 6
            await synced(engine, tmp_path, 3)
            assert all(set(fake.adapters) == {f"solver@{EPOCH}.3", f"critic@{EPOCH}.3"} for fake in fakes)

    run(work())


@pytest.mark.parametrize("kinds", [(), ("prefill", "decode")], ids=["regular", "pairs"])
def test_behind_sglangs_router_every_server_has_the_adapters_and_requests_name_them(tmp_path, kinds):
    async def work():
        async with routed(tmp_path, 2, kinds=kinds, adapters=NAMES) as parts:
            for version in (1, 2):
                await synced(parts.engine, tmp_path, version)
            done = await parts.engine.generate(request("a-0", adapter="critic"))
            assert done.versions == [2] * 6
            bodies = [body for fake in parts.fakes for body in fake.bodies]
            assert {body["lora_path"] for body in bodies} == {f"critic@{EPOCH}.2"}
            assert all(set(fake.adapters) == {f"solver@{EPOCH}.2", f"critic@{EPOCH}.2"} for fake in parts.fakes)

    run(work())


# -- what servers are started with, and what is refused


def config_of(sglang=None, rollout=None, device="cpu", **train):
    tables = {
        "cluster": {"device": device},
        "sglang": sglang or {},
        "train": {"lora_rank": 8, "lora_sync": "adapter", **train},
    }
    return Config.model_validate({**tables, "rollout": {"rollout_engine": "sglang", **(rollout or {})}})


def test_servers_have_a_place_for_each_adapter_and_one_more(tmp_path):
    merged = Config.model_validate({"train": {"lora_rank": 8}})
    assert adapters.options(merged, str(tmp_path)) == {}
    assert adapters.options(config_of(lora_target_modules=["self_attn.q_proj", "v_proj"]), str(tmp_path)) == {
        "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"],
        "max_loras_per_batch": 2, "max_loaded_loras": 2, "lora_backend": "torch_native",
    }  # fmt: skip
    options = adapters.options(config_of(device="cuda", lora_adapters=NAMES), str(tmp_path))
    assert options["max_loras_per_batch"] == options["max_loaded_loras"] == 3
    assert set(options["lora_target_modules"]) == {*adapters.ATTENTION, *adapters.MLP}
    assert "lora_backend" not in options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_use_dora": True}, "SGLang knows no DoRA"),
        ({"lora_target_modules": ["q_proj", "v_proj"], "lora_target_parameters": ["experts.down_proj"]}, "of experts"),
        ({"lora_target_modules": ["q_proj", "v_proj", "router"]}, "none of router"),
        ({"lora_target_modules": ["k_proj"]}, "serves k_proj with q_proj alone"),
        ({"lora_target_modules": ["up_proj"]}, "serves up_proj with gate_proj alone"),
        ({"sglang": {"max-lora-rank": 64}}, "sglang.max-lora-rank with lora_sync = adapter"),
        ({"sglang": {"dp_size": 2}}, "sglang.dp_size = 2 with lora_sync = adapter"),
        ({"rollout": {"rollout_quantization": "fp8"}, "device": "cuda", "dtype": "bfloat16"}, "rollout_quantization"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_sglang_cannot_serve_is_refused_with_the_way_out(changes, message):
    problems = [problem for problem in conflicts(config_of(**changes)) if message in f"{problem.what} {problem.why}"]
    assert problems, [problem.what for problem in conflicts(config_of(**changes))]
    assert all(problem.code == "CFG04" and ("merged" in problem.fix or "leave" in problem.fix) for problem in problems)
    assert not [problem for problem in conflicts(config_of(**changes, lora_sync="merged")) if message in problem.what]


@pytest.mark.parametrize("stored", [True, False])
def test_servers_that_start_without_weights_take_adapters_from_memory_alone(tmp_path, stored):
    table = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": table} if stored else {}))
    rollout = {"hf_checkpoint": str(tmp_path)} | ({} if stored else {"init_weights": "random"})
    (problem,) = conflicts(config_of(rollout=rollout))
    assert problem.code == "CFG04"
    assert problem.fix.startswith("--lora-sync merged")
    assert not list(conflicts(config_of(rollout=rollout, lora_sync="merged")))
    running = {"rollout_external_engine_addrs": ["http://127.0.0.1:30000"]}  # their weights are there already
    assert not [one for one in conflicts(config_of(rollout=rollout | running)) if "lora_sync" in one.what]
    assert not [one for one in conflicts(config_of(rollout=rollout, device="cuda")) if "lora_sync" in one.what]


def test_a_pause_mode_of_ones_own_is_said_to_have_no_effect():
    rollout = {"pause_generation_mode": "in_place", "max_staleness": 1}
    assert any("no effect with lora_sync = adapter" in text for text in notices(config_of(rollout=rollout)))


def test_a_model_with_experts_has_adapters_of_its_attention_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4}))
    rollout = {"hf_checkpoint": str(tmp_path)}
    (problem,) = conflicts(config_of(rollout=rollout))
    assert "the model has experts" in problem.why
    attention = config_of(rollout=rollout, lora_target_modules=["q_proj", "v_proj", "o_proj"])
    assert not list(conflicts(attention))


def test_layers_that_the_servers_have_no_adapters_of_are_named_before_anything_starts():
    from transformers import GPT2Config, PhiConfig, Qwen3Config

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    adapters.check_model(config_of(), Qwen3Config(**small, num_key_value_heads=2, head_dim=8))
    with pytest.raises(ConfigError, match=r"none of dense, fc1, fc2"):
        adapters.check_model(config_of(), PhiConfig(**small))
    regex = config_of(lora_target_modules=[r".*\.(k_proj|o_proj)"])
    with pytest.raises(ConfigError, match="serves k_proj with q_proj alone"):
        adapters.check_model(regex, Qwen3Config(**small, num_key_value_heads=2, head_dim=8))
    adapters.check_model(Config.model_validate({}), GPT2Config())


def test_a_server_that_runs_already_is_told_what_it_was_not_started_with():
    facts = {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": ["all"], "max_loaded_loras": None}
    assert missing_options(facts, config_of()) == ""
    assert missing_options({}, Config.model_validate({})) == ""
    for change in (
        {"enable_lora": None},
        {"max_lora_rank": 4},
        {"lora_target_modules": ["q_proj"]},
        {"max_loaded_loras": 1},
    ):
        needed = missing_options(facts | change, config_of(device="cuda"))
        assert needed.startswith("--enable-lora --max-lora-rank 8 --lora-target-modules down_proj gate_proj")
        assert needed.endswith("--max-loras-per-batch 2 --max-loaded-loras 2")
