"""Whole rollouts by slime's own functions: under their dotted names, and called by functions of a user."""

import asyncio
import threading

import pytest

from slime_core.config.schema import Config
from slime_core.errors import PluginError
from slime_core.rollout.groups import training_params
from slime_core.types import Status

pytestmark = pytest.mark.unit

REWARD = "\ndef reward(args, sample, **kwargs):\n    return float(sample.index)\n"
WRAPPER = """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.{module} import {name}

def fn(args, rollout_id, data_buffer, evaluation=False):
    output = {name}(args, rollout_id, data_buffer, evaluation=evaluation)
    for group in output.samples if isinstance(output, RolloutFnTrainOutput) else []:
        group[0].metadata["rollout"] = rollout_id
    return output
"""


def run(config, connect, *groups, **changes):
    plugins, ctx = connect(config, **changes)
    return asyncio.run(plugins.rollout(list(groups), ctx))


@pytest.fixture
def wrapped(write):
    """A config whose rollout function calls the one of slime."""

    def wrapped(module, name, **rollout):
        path = write(WRAPPER.format(module=module, name=name) + REWARD)
        rollout |= {"rollout_function_path": f"{path}:fn", "rollout_batch_size": 2, "n_samples_per_prompt": 2}
        return Config(rollout=rollout, reward={"custom_rm_path": f"{path}:reward"})

    return wrapped


@pytest.mark.parametrize(
    ("module", "name"),
    [("sglang_rollout", "generate_rollout"), ("fully_async_rollout", "generate_rollout_fully_async")],
)
def test_a_wrapped_rollout_draws_judges_and_returns_every_group_as_the_core_would(
    wrapped, connect, make_group, module, name
):
    groups = [make_group(position=5), make_group(position=6)]
    done = run(wrapped(module, name), connect, *groups)
    core, ctx = connect(Config(), sampling=training_params(Config()))
    for position, group in zip((5, 6), done, strict=True):
        direct = asyncio.run(core.generate(make_group(position=position), ctx))
        assert [s.tokens for s in group.samples] == [s.tokens for s in direct.samples]
        assert [s.rollout_log_probs for s in group.samples] == [s.rollout_log_probs for s in direct.samples]
        assert (
            [s.reward for s in group.samples] == [s.index for s in direct.samples] == [2 * position, 2 * position + 1]
        )
        assert {s.status for s in group.samples} == {Status.COMPLETED}
        assert group.rollouts == direct.rollouts


@pytest.mark.parametrize(
    ("module", "name"),
    [("sglang_rollout", "generate_rollout"), ("fully_async_rollout", "generate_rollout_fully_async")],
)
def test_requests_from_other_event_loops_are_served_in_the_engines(wrapped, connect, make_group, module, name):
    plugins, ctx = connect(wrapped(module, name))
    generate, loops = ctx.engine.generate, set()

    async def noted(request):
        loops.add(asyncio.get_running_loop())
        return await generate(request)

    ctx.engine.generate = noted

    async def rollout():
        await plugins.rollout([make_group()], ctx)
        return asyncio.get_running_loop()

    assert loops == {asyncio.run(rollout())}


OWN_SOURCE = """
from slime.rollout.fully_async_rollout import generate_rollout_fully_async

class Source:
    def __init__(self, buffer):
        self.buffer = buffer

    def get_samples(self, num_samples):
        return self.buffer.get_samples(num_samples) if len(self.buffer) else []

def fn(args, rollout_id, data_buffer, evaluation=False):
    return generate_rollout_fully_async(args, rollout_id, Source(data_buffer))
"""


def test_a_worker_over_a_source_of_ones_own_goes_on_after_the_step_and_ends_with_the_run(write, connect, make_group):
    path = write(OWN_SOURCE + REWARD)
    rollout = {"rollout_function_path": f"{path}:fn", "rollout_batch_size": 1, "n_samples_per_prompt": 2}
    plugins, ctx = connect(Config(rollout=rollout, reward={"custom_rm_path": f"{path}:reward"}))
    (done,) = asyncio.run(plugins.rollout([make_group()], ctx))
    assert [sample.reward for sample in done.samples] == [10.0, 11.0]
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "slime-fully-async"]
    assert worker.is_alive()
    plugins.close()
    assert not worker.is_alive()


ABORTED = """
import asyncio
from slime.rollout.sglang_rollout import GenerateState, abort, generate_and_rm, generate_and_rm_group

async def fn(args, rollout_id, data_buffer, evaluation=False):
    state, (first, second) = GenerateState(args), data_buffer.get_samples(2)
    assert GenerateState(args) is state
    state.submit_generate_tasks([first])
    await asyncio.wait(state.pendings)
    state.submit_generate_tasks([second])
    assert state.remaining_batch_size == 2
    groups = await abort(args, rollout_id)
    assert sorted(group[0].index for group in groups) == [first[0].index, second[0].index]
    assert [sample.metadata.get("start_rollout_id") for sample in first] == [2, 2]
    assert [(sample.response, sample.metadata) for sample in second] == [("", {})] * 2
    late = await generate_and_rm(args, second[0], dict(state.sampling_params))
    assert late.status == late.Status.ABORTED and late.reward is None
    state.reset()
    assert (state.remaining_batch_size, state.pendings) == (0, set())
    with state.dp_rank_context() as rank:
        assert (rank, state.dp_counts) == (0, [1])
    await generate_and_rm_group(args, second, dict(state.sampling_params))
    assert all(sample.reward is not None for sample in second)
    sample = second[0]
    sample.status, before = sample.Status.ABORTED, list(sample.tokens)
    await generate_and_rm(args, sample, {**state.sampling_params, "max_new_tokens": sample.response_length})
    assert (sample.status, sample.tokens) == (sample.Status.TRUNCATED, before)
    return [first, second]
"""


def test_an_abort_returns_groups_for_the_next_step_and_keeps_others_from_beginning(write, connect, make_group):
    path = write(ABORTED + REWARD)
    config = Config(
        rollout={
            "rollout_function_path": f"{path}:fn",
            "partial_rollout": True,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
        },
        reward={"custom_rm_path": f"{path}:reward"},
    )
    done = run(config, connect, make_group(position=5), make_group(position=6))
    assert [len(group.samples) for group in done] == [2, 2]


def test_a_wrapped_rollout_takes_over_sampled_groups_too(wrapped, connect, make_group):
    config = wrapped("sglang_rollout", "generate_rollout", over_sampling_batch_size=3)
    done = run(config, connect, *(make_group(position=position) for position in (5, 6, 7)))
    assert [group.prompt.position for group in done] == [5, 6, 7]
    assert [group.samples[0].metadata for group in done] == [{"rollout": 2}] * 3


def test_a_filter_that_leaves_a_wrapped_rollout_short_says_that_the_core_replaces_groups(wrapped, connect, make_group):
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    config = wrapped("sglang_rollout", "generate_rollout", dynamic_sampling_filter_path=path)
    same = make_group(position=6)
    for sample in same.samples:
        sample.index = 0
    with pytest.raises(PluginError, match="which is the core's own collector"):
        run(config, connect, make_group(position=5), same)


def test_a_wrapped_evaluation_reports_each_set_with_its_rewards(wrapped, connect, make_group):
    config = wrapped("sglang_rollout", "generate_rollout")
    config = config.model_copy(
        update={"eval": config.eval.model_copy(update={"eval_function_path": config.rollout.rollout_function_path})}
    )
    (group,) = run(config, connect, make_group(position=5), evaluation=True)
    assert [sample.reward for sample in group.samples] == [10.0, 11.0]


@pytest.mark.parametrize(
    ("key", "path", "loss"),
    [
        ("rollout_function_path", "slime.rollout.sglang_rollout.generate_rollout", "policy_loss"),
        ("rollout_function_path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async", "policy_loss"),
        ("rollout_function_path", "slime.rollout.sft_rollout.generate_rollout", "sft_loss"),
        ("data_source_path", "slime.rollout.data_source.RolloutDataSourceWithBuffer", "policy_loss"),
    ],
    ids=["slime's default", "fully async", "supervised", "slime's default source"],
)
def test_slimes_own_names_mean_what_the_core_does_itself(connect, key, path, loss):
    config = Config(rollout={key: path}, train={"loss_type": loss}, reward={"custom_rm_path": "json:dumps"})
    plugins, _ = connect(config)
    core, _ = connect(Config(train={"loss_type": loss}, reward={"custom_rm_path": "json:dumps"}))
    assert plugins.routing() == core.routing()


def test_a_source_that_derives_from_slimes_own_is_the_users(by, connect):
    source = (
        "from slime.rollout.data_source import RolloutDataSourceWithBuffer\n"
        "class fn(RolloutDataSourceWithBuffer):\n    pass\n"
    )
    plugins, _ = connect(by(source, data_source_path=True))
    assert "data_source_path" in str(plugins.routing())
