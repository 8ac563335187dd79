"""Functions written for THUDM/slime run as they are, on a CPU, against an engine behind the loopback server."""

import asyncio
import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slime_compat.served.distillation import reward_func
from slime_core.compat.sample import Sample
from slime_core.config.schema import Config
from slime_core.config.sections.reward import RewardSection
from slime_core.config.sections.rollout import RolloutSection
from slime_core.errors import EngineError, PluginError
from slime_core.types import Reward, Sample as CoreSample, SamplingParams, Status

pytestmark = pytest.mark.unit


def run(plugins, group, ctx):
    async def both():
        done = await plugins.generate(group, ctx)
        return done, await plugins.reward(done, ctx)

    return asyncio.run(both())


@pytest.fixture
def search(functions):
    return Config(
        rollout=RolloutSection(custom_generate_function_path=f"{functions}/search_shape.py:generate"),
        reward=RewardSection(custom_rm_path=f"{functions}/search_shape.py:reward_func"),
    )


@pytest.fixture
def tool(functions):
    return Config(
        rollout=RolloutSection(custom_generate_function_path=f"{functions}/tool_shape.py:generate"),
        reward=RewardSection(custom_rm_path=f"{functions}/tool_shape.py:reward_func", reward_key="score"),
    )


def test_a_search_function_takes_turns_and_masks_what_it_found(search, connect, make_group, tokenizer):
    script = {
        "france?\n": "<search>capital of france</search>",
        "</info>\n": "<answer>paris</answer>",
    }
    plugins, ctx = connect(search, script)
    group = make_group("capital of france?\n", {"ground_truth": "paris"})
    done, rewards = run(plugins, group, ctx)
    assert rewards == [Reward(value=1.0), Reward(value=1.0)]
    for sample in done.samples:
        seen = "<search>capital of france</search><eos>\n<info>paris</info>\n<answer>paris</answer><eos>"
        assert sample.response == seen
        assert sample.status is Status.COMPLETED
        masked = tokenizer.decode([t for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if not m])
        assert masked == "\n<info>paris</info>\n"
        assert sample.weight_versions == [2 if m else -1 for m in sample.loss_mask]
        assert sample.rollout_log_probs == [-0.5 if m else 0.0 for m in sample.loss_mask]
    assert done.rollouts == group.rollouts


def test_a_tool_function_keeps_its_own_attributes_until_the_reward(tool, connect, make_group):
    script = {"2+3": "<code>2+3</code>", "</out>": "=5"}
    plugins, ctx = connect(tool, script)
    done, rewards = run(plugins, make_group("2+3", "5<eos>"), ctx)
    assert rewards == [Reward(value=1.0, terms={"calls": 1.0})] * 2
    assert [sample.tool_call_count for sample in done.samples] == [1, 1]
    assert all(len(s.rollout_log_probs) == len(s.loss_mask) == s.response_length for s in done.samples)
    assert "payload_text" not in CoreSample.to_dict(done.samples[0]), "the ledger has no attributes"


def test_a_response_that_is_cut_is_truncated(tool, connect, make_group):
    plugins, ctx = connect(tool, {"2+3": "<code>2+3</code>"}, sampling=SamplingParams(max_new_tokens=4))
    done, _ = run(plugins, make_group("2+3", "5"), ctx)
    assert {sample.status for sample in done.samples} == {Status.TRUNCATED}


def test_one_turn_through_the_server_draws_what_core_draws(connect, make_group):
    """The draw is keyed by the sample, not by the way it is asked for."""
    config = Config(
        rollout=RolloutSection(custom_generate_function_path="slime.rollout.sglang_rollout.generate"),
    )
    plugins, ctx = connect(config)
    core, plain = connect(Config())
    through = asyncio.run(plugins.generate(make_group(n=3), ctx))
    direct = asyncio.run(core.generate(make_group(n=3), plain))
    assert [s.tokens for s in through.samples] == [s.tokens for s in direct.samples]
    assert [s.rollout_log_probs for s in through.samples] == [s.rollout_log_probs for s in direct.samples]
    assert [s.weight_versions for s in through.samples] == [s.weight_versions for s in direct.samples]
    assert [s.status for s in through.samples] == [s.status for s in direct.samples]


def test_asking_twice_for_the_same_tokens_draws_anew_and_repeats_over_runs(by, connect, make_group):
    source = """
from slime.utils.http_utils import post
async def fn(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params}
    made = [(await post(url, payload))["output_ids"] for _ in range(2)]
    sample.metadata["twice"] = made
    sample.append_response(made[0], log_probs=[-1.0] * len(made[0]))
    return sample
"""
    config = by(source, custom_generate_function_path=True)
    plugins, ctx = connect(config)
    first, second = (asyncio.run(plugins.generate(make_group(), ctx)).samples for _ in range(2))
    assert all(s.metadata["twice"][0] != s.metadata["twice"][1] for s in first)
    assert [s.metadata for s in first] == [s.metadata for s in second]


def test_an_engine_that_fails_behind_the_server_is_told_as_an_engine_error(search, connect, make_group):
    plugins, ctx = connect(search)
    ctx.engine.version = -1
    with pytest.raises(EngineError) as caught:
        asyncio.run(plugins.generate(make_group(), ctx))
    assert "no weights are loaded" in str(caught.value)


def test_images_are_refused_where_only_text_is_sent(connect, make_group):
    plugins, ctx = connect(Config(rollout={"custom_generate_function_path": "slime.rollout.sglang_rollout.generate"}))
    group = make_group()
    group.samples[0].multimodal_inputs = {"images": ["a.png"], "videos": None}
    with pytest.raises(PluginError, match=r"has images, and the model takes text: "):
        asyncio.run(plugins.generate(group, ctx))
    scored = Sample(id="a", tokens=[1], multimodal_inputs={"images": ["a.png"]})
    with pytest.raises(ValueError, match="sample a has images"):
        asyncio.run(reward_func(SimpleNamespace(rm_url="http://127.0.0.1:1"), scored))


def test_rewards_by_type_are_slimes_and_what_could_not_be_judged_raises(by, connect, make_group):
    source = """
from slime.rollout.rm_hub import async_rm
async def fn(args, sample, sampling_params):
    sample.append_response([7], [-1.0])
    sample.response, sample.label, sample.metadata["rm_type"] = "Answer: 42", "42", "dapo"
    dapo = await async_rm(args, sample)
    sample.label, sample.metadata["rm_type"] = None, "math"
    try:
        await async_rm(args, sample)
    except RuntimeError as error:
        sample.metadata = {"dapo": dapo, "error": str(error)}
    return sample
"""
    config = by(source, custom_generate_function_path=True)
    plugins, ctx = connect(
        config.model_copy(update={"plugins": ("rm_math",), "reward": RewardSection(rm_type="math")})
    )
    sample = asyncio.run(plugins.generate(make_group(), ctx)).samples[0]
    assert sample.metadata["dapo"] == {"score": 1.0, "acc": True, "pred": "42"}
    assert "could not be judged by rm_type math: the row has no label" in sample.metadata["error"]


def test_slimes_modules_are_there_while_the_run_lives_and_gone_after(search, connect):
    assert "slime" not in sys.modules
    plugins, _ = connect(search)
    import slime.utils.types  # the finder serves it

    assert slime.utils.types.Sample.Status.COMPLETED == "completed"
    plugins.close()
    assert not [name for name in sys.modules if name == "slime" or name.startswith("slime.")]
    with pytest.raises(ModuleNotFoundError):
        import slime.utils.http_utils


def test_functions_without_log_probs_get_the_engines_own_where_it_can_tell_them(by, connect, make_group):
    source = """
from slime.utils.http_utils import post
async def fn(args, sample, sampling_params, evaluation=False):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    answer = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    assert "output_token_logprobs" not in answer["meta_info"]
    sample.tokens = sample.tokens + answer["output_ids"]
    sample.response_length = len(answer["output_ids"])
    sample.status = sample.Status.COMPLETED
    return sample
"""
    plugins, ctx = connect(by(source, custom_generate_function_path=True))
    done = asyncio.run(plugins.generate(make_group(), ctx))
    import math

    assert all(
        s.rollout_log_probs == pytest.approx([-math.log(ctx.engine.vocab_size)] * s.response_length)
        for s in done.samples
    )


def test_an_agent_function_talks_to_an_adapter_and_its_dialogue_is_a_sample(connect, make_group, functions, tokenizer):
    path = f"{functions}/agent_shape.py:generate"
    plugins, ctx = connect(
        Config(rollout=RolloutSection(custom_generate_function_path=path)), {"1\n": "2", "e\n": "3"}
    )
    speaker = copy.deepcopy(tokenizer)
    speaker.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    group = asyncio.run(plugins.generate(make_group("1+1"), replace(ctx, tokenizer=speaker)))
    for sample in group.samples:
        assert tokenizer.decode(sample.tokens) == "1+1\n2<eos>\nmore\n3<eos>"
        assert sample.loss_mask == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
        assert sample.weight_versions == [2 if mask else -1 for mask in sample.loss_mask]
        assert (sample.reward, sample.status, sample.metadata["chat"]["calls"]) == (0.5, Status.COMPLETED, 2)
        assert sample.metadata["grading_solved"] is False
