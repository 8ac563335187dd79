"""Filters, sample hooks, log functions and those of Megatron's ranks with slime's signatures."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from slime_core.config.schema import Config
from slime_core.errors import ConfigError, PluginError
from slime_core.types import Drop, Sample, Status, StepReport

pytestmark = pytest.mark.unit


def scored(group, *rewards):
    for sample, reward in zip(group.samples, rewards, strict=True):
        sample.reward, sample.status = reward, Status.COMPLETED
    return group


OUTPUT = "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("def fn(args, samples, **kw):\n    return True\n", None),
        ("def fn(args, samples, **kw):\n    return False\n", Drop(reason="dynamic_filter")),
        (
            OUTPUT + "def fn(args, samples, **kw):\n    return DynamicFilterOutput(keep=False, reason='short')\n",
            Drop(reason="short"),
        ),
        (OUTPUT + "async def fn(args, samples, **kw):\n    return DynamicFilterOutput(keep=True)\n", None),
        ("import numpy as np\ndef fn(args, samples, **kw):\n    return np.std([1, 0]) > 0\n", None),
        (
            OUTPUT + "import torch\ndef fn(args, samples, **kw):\n"
            "    rewards = torch.tensor([s.reward for s in samples])\n"
            "    return DynamicFilterOutput(keep=rewards.std() > 9, reason='zero_std')\n",
            Drop(reason="zero_std"),
        ),
    ],
    ids=["kept", "dropped", "with a reason", "async", "a bool of numpy", "a tensor, as slime's own"],
)
def test_a_dynamic_filter_answers_with_a_bool_or_slimes_output(by, connect, make_group, source, verdict):
    plugins, ctx = connect(by(source, dynamic_sampling_filter_path=True))
    assert asyncio.run(plugins.filter(scored(make_group(), 1.0, 0.0), ctx)) == verdict


@pytest.mark.parametrize(("rewards", "kept"), [((1.0, 0.0), True), ((1.0, 1.0), False)], ids=["spread", "tie"])
def test_slimes_own_filter_is_served_under_its_own_path(connect, make_group, rewards, kept):
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    plugins, ctx = connect(Config(rollout={"dynamic_sampling_filter_path": path}))
    verdict = asyncio.run(plugins.filter(scored(make_group(), *rewards), ctx))
    assert (verdict is None) is kept
    assert kept or verdict.reason == "zero_std_1.0"


def test_a_filter_with_a_fallback_drops_nothing_and_over_sampling_refuses_it(connect, make_group):
    """slime keeps a group where those in flight and kept are no more than the step needs: without over-sampling all."""
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    plugins, ctx = connect(Config(rollout={"dynamic_sampling_filter_path": path}))
    assert asyncio.run(plugins.filter(scored(make_group(), 1.0, 1.0), ctx)) is None
    rollout = {"dynamic_sampling_filter_path": path, "rollout_batch_size": 2, "over_sampling_batch_size": 3}
    plugins, ctx = connect(Config(rollout=rollout))
    assert asyncio.run(plugins.filter(scored(make_group(), 1.0, 0.0), ctx)) is None
    with pytest.raises(ConfigError, match="keep_when_insufficient") as caught:
        asyncio.run(plugins.filter(scored(make_group(), 1.0, 1.0), ctx))
    assert "over_sampling_batch_size to 0" in caught.value.fix


def test_a_dynamic_filter_that_answers_neither_is_refused(by, connect, make_group):
    plugins, ctx = connect(by("def fn(args, samples):\n    return 'yes'\n", dynamic_sampling_filter_path=True))
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.filter(scored(make_group(), 1.0, 0.0), ctx))
    assert "a bool or a DynamicFilterOutput" in caught.value.what


DICTS = """
def reward(args, sample):
    return {"score": 1.0, "accurate": sample.index % 2 == 0, "prediction": "x"}
def keep(args, samples, **kw):
    assert [s.reward["prediction"] for s in samples] == ["x", "x"]
    return any(s.reward["accurate"] for s in samples)
async def later(args, samples, **kw):
    return keep(args, samples)
def mark(args, data):
    for sample in data[0]:
        sample.remove_sample = not sample.reward["accurate"]
def post(args, samples):
    raw = [s.get_reward_value(args) for s in samples]
    return raw, [float(s.reward["accurate"]) for s in samples]
"""


@pytest.mark.parametrize("dynamic", ["keep", "later"])
@pytest.mark.parametrize("resumed", [False, True], ids=["alive", "from the ledger"])
def test_functions_see_the_dict_that_a_reward_function_returned(write, connect, make_group, dynamic, resumed):
    from slime_core.ledger.codec import decode, encode
    from slime_core.rollout.score import score_group
    from slime_core.trainers.batch import make_batch

    path = write(DICTS)
    config = Config(
        rollout={
            "dynamic_sampling_filter_path": f"{path}:{dynamic}",
            "rollout_sample_filter_path": f"{path}:mark",
        },
        reward={
            "custom_rm_path": f"{path}:reward",
            "reward_key": "score",
            "custom_reward_post_process_path": f"{path}:post",
        },
    )
    plugins, ctx = connect(config)
    group = make_group()
    for sample in group.samples:
        sample.append_response([3], log_probs=[-1.0])
    group, _ = asyncio.run(score_group(group, plugins, ctx))
    assert [(s.reward, s.remove_sample) for s in group.samples] == [(1.0, False), (1.0, True)]
    if resumed:
        group.samples[:] = [decode(b"".join(encode(sample))) for sample in group.samples]
        plugins.note_group(group, config)
    batch = plugins.advantage(make_batch(2, "main", [group]), {}, config.train)
    assert batch.columns["advantages"].tolist() == [1.0, 0.0]
    assert batch.reward.tolist() == [1.0, 1.0]


def test_a_sample_filter_marks_samples_and_keeps_the_group(by, connect, make_group):
    source = "def fn(args, data):\n    for group in data:\n        group[0].remove_sample = True\n"
    plugins, ctx = connect(by(source, rollout_sample_filter_path=True))
    group = scored(make_group(), 1.0, 0.0)
    assert asyncio.run(plugins.filter(group, ctx)) is None
    assert [s.remove_sample for s in group.samples] == [True, False]


@pytest.mark.parametrize(
    ("body", "verdict"),
    [("return [buffer.pop(0)]", None), ("return []", Drop(reason="buffer_filter"))],
    ids=["taken", "left"],
)
def test_a_buffer_filter_takes_the_group_or_drops_it(by, connect, make_group, body, verdict):
    plugins, ctx = connect(
        by(f"def fn(args, rollout_id, buffer, num_samples):\n    {body}\n", buffer_filter_path=True)
    )
    assert asyncio.run(plugins.filter(scored(make_group(), 1.0, 0.0), ctx)) == verdict


@pytest.mark.parametrize(
    "source",
    [
        "def fn(args, sample):\n    sample.metadata['seen'] = True\n",
        "async def fn(args, sample, *, rollout_id=None, evaluation=False):\n    sample.metadata['seen'] = rollout_id == 2\n    return sample\n",
        "import copy\ndef fn(args, sample, **kw):\n    other = copy.deepcopy(sample)\n    other.metadata['seen'] = True\n    return other\n",
    ],
    ids=["changes it", "async with keywords", "replaces it"],
)
def test_sample_hooks_may_change_or_replace_a_sample(write, connect, make_group, source):
    plugins, ctx = connect(Config(rollout={"rollout_sample_hook_path": (write(source) + ":fn",)}))
    sample = make_group().samples[0]
    asyncio.run(plugins.sample_done(sample, ctx))
    assert sample.metadata == {"seen": True}


@pytest.mark.parametrize("result", ["None", "copy.deepcopy(sample)"], ids=["changes it", "replaces it"])
def test_the_reward_sees_attributes_that_a_sample_hook_set(write, connect, make_group, result):
    from slime_core.rollout.score import score_group

    path = write(
        "import copy\n"
        f"def fn(args, sample):\n    sample.count = 3 + sample.index\n    return {result}\n"
        "def reward(args, sample):\n    return float(sample.count)\n"
    )
    config = Config(rollout={"rollout_sample_hook_path": (path + ":fn",)}, reward={"custom_rm_path": path + ":reward"})
    plugins, ctx = connect(config)
    group = make_group(position=0)
    for sample in group.samples:
        sample.append_response([3], log_probs=[-1.0])
    scored_group, _ = asyncio.run(score_group(group, plugins, ctx))
    assert [sample.reward for sample in scored_group.samples] == [3.0, 4.0]


def test_several_sample_hooks_are_called_in_order(write, connect, make_group):
    path = write(
        "def one(args, sample):\n    sample.response += 'a'\ndef two(args, sample):\n    sample.response += 'b'\n"
    )
    plugins, ctx = connect(Config(rollout={"rollout_sample_hook_path": (f"{path}:two", f"{path}:one")}))
    sample = make_group().samples[0]
    asyncio.run(plugins.sample_done(sample, ctx))
    assert sample.response == "ba"


def test_a_sample_hook_that_returns_something_else_is_refused(write, connect, make_group):
    path = write("def fn(args, sample):\n    return 1\n")
    plugins, ctx = connect(Config(rollout={"rollout_sample_hook_path": (f"{path}:fn",)}))
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.sample_done(make_group().samples[0], ctx))
    assert "return the sample or None" in caught.value.what


@pytest.mark.parametrize("fails", [False, True], ids=["well", "in an error"])
@pytest.mark.parametrize("source", ["async def fn(ctx):\n", "def fn(context):\n    ctx = context\n"])
def test_a_function_is_told_once_that_the_run_is_over_however_it_ended(write, connect, source, fails, tmp_path):
    source += "    (ctx.run_dir / 'ended').touch(exist_ok=False)\n"
    plugins, ctx = connect(Config(rollout={"run_done_path": write(source) + ":fn"}), run_dir=tmp_path)

    async def run():
        async with plugins.running(ctx):
            assert not (tmp_path / "ended").exists()
            if fails:
                raise KeyError("the run")

    with pytest.raises(KeyError) if fails else nullcontext():
        asyncio.run(run())
    assert (tmp_path / "ended").exists()


def test_a_function_at_a_runs_end_that_wants_more_is_refused(write, connect):
    with pytest.raises(PluginError, match=r"def fn\(ctx\)"):
        connect(Config(rollout={"run_done_path": write("def fn(args, sample):\n    pass\n") + ":fn"}))


def test_a_log_function_is_told_of_a_step_with_its_samples(write, connect, make_group):
    from slime_core.trainers.batch import make_batch

    source = "CALLS = []\ndef fn(rollout_id, args, samples, extra, seconds):\n    CALLS.append((rollout_id, [s.id for s in samples], extra, seconds))\n    return True\ndef reward(sample):\n    return 1.0\n"
    path = write(source)
    config = Config(
        report={"custom_rollout_log_function_path": f"{path}:fn"}, reward={"custom_rm_path": f"{path}:reward"}
    )
    plugins, ctx = connect(config)
    group = make_group()
    for sample in group.samples:
        sample.append_response([3], log_probs=[-1.0])
    rewards = asyncio.run(plugins.reward(group, ctx))
    for sample, reward in zip(group.samples, rewards, strict=True):
        sample.reward = reward.value
    batch = plugins.advantage(make_batch(2, "main", [group]), {}, config.train)
    plugins.batch(batch, ctx)
    report = StepReport(version=3, stage="main", step=2, of=5, metrics={"reward/mean": 1.0}, seconds={"rollout": 0.25})
    plugins.step_done(report, ctx)
    from slime_core.plugins.locate import locate

    calls = locate(f"{path}:fn", "key").__globals__["CALLS"]
    assert calls == [(2, ["main/5-0", "main/5-1"], {"reward/mean": 1.0}, 0.25)]


def test_a_function_sees_all_groups_of_a_step_also_those_that_a_filter_dropped(write, connect, make_group):
    from slime_core.rollout.score import score_group

    path = write(
        "CALLS = []\n"
        "def fn(args, all_groups, data_source):\n"
        "    args.processed = len(all_groups)\n"
        "    CALLS.append(([[s.reward for s in g] for g in all_groups], args.processed, data_source(1)))\n"
        "def reward(args, sample):\n    return float(sample.group_index)\n"
        "def keep(args, samples, **kw):\n    return samples[0].group_index > 1\n"
    )
    rollout = {"rollout_all_samples_process_path": f"{path}:fn", "dynamic_sampling_filter_path": f"{path}:keep"}
    plugins, ctx = connect(Config(rollout=rollout, reward={"custom_rm_path": f"{path}:reward"}))

    async def judge(group, ctx):
        for sample in group.samples:
            sample.append_response([3], log_probs=[-1.0])
        return await score_group(group, plugins, ctx)

    kept = [asyncio.run(judge(make_group(position=p), ctx))[0] for p in (3, 1, 2)]
    asyncio.run(plugins.reward(make_group(position=9), replace(ctx, evaluation=True)))
    assert [group is not None for group in kept] == [True, False, True]
    report = StepReport(version=3, stage="main", step=2, of=5, metrics={}, seconds={})
    for _ in range(2):
        plugins.step_done(report, ctx)
    from slime_core.plugins.locate import locate

    calls = locate(f"{path}:fn", "key").__globals__["CALLS"]
    assert calls == [([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], 3, []), ([], 0, [])]


READERS = """
SEEN = []
def hook(args, sample, **kw):
    SEEN.append(("hook", sample.response))
def slimes(args, sample, **kw):
    SEEN.append(("reward", sample.response))
    return 1.0
def plain(sample):
    SEEN.append(("reward", sample.response))
    return 1.0
def native(group, ctx):
    SEEN.append(("reward", group.samples[0].response))
    return [1.0]
def cuts(args, sample, **kw):
    sample.response = "cut"
    return slimes(args, sample)
def keep(args, samples, **kw):
    SEEN.append(("filter", samples[0].response))
    return True
def log(rollout_id, args, samples, extra, seconds):
    SEEN.append(("log", samples[0].response))
async def generate(args, sample, params):
    sample.append_response_tokens(args, tokens=[5, 17, 1], log_probs=[-1.0] * 3, text="own")
    return sample
"""


@pytest.mark.parametrize(
    ("reward", "rollout", "hook", "judged", "later"),
    [
        ("slimes", {}, "2=<eos>", "2=<eos>", "2=<eos>"),
        ("slimes", {"rollout_skip_special_tokens": True}, "2=", "2=", "2="),
        ("plain", {}, "2=<eos>", "2", "2=<eos>"),
        ("native", {}, "2=<eos>", "2", "2=<eos>"),
        ("cuts", {}, "2=<eos>", "cut", "cut"),
        ("slimes", {"custom_generate_function_path": "generate"}, "own", "own", "own"),
    ],
    ids=["slime's", "without special tokens", "of the sample alone", "the hook's own", "changes it", "generates too"],
)
def test_functions_of_slime_read_the_text_of_all_response_tokens(
    write, connect, make_group, reward, rollout, hook, judged, later
):
    from slime_core.plugins.locate import locate
    from slime_core.rollout.score import score_group
    from slime_core.trainers.batch import make_batch

    path = write(READERS)
    rollout = {name: value if value is True else f"{path}:{value}" for name, value in rollout.items()}
    rollout |= {"rollout_sample_hook_path": (f"{path}:hook",), "dynamic_sampling_filter_path": f"{path}:keep"}
    report = {"custom_rollout_log_function_path": f"{path}:log"}
    config = Config(rollout=rollout, report=report, reward={"custom_rm_path": f"{path}:{reward}"})
    plugins, ctx = connect(config)
    group = make_group(n=1)
    if config.rollout.custom_generate_function_path:
        group = asyncio.run(plugins.generate(group, ctx))
    else:
        group.samples[0].append_response([5, 17, 1], log_probs=[-1.0] * 3, text="2")

    def records(group):
        seen = locate(f"{path}:log", "key").__globals__["SEEN"]
        seen.clear()
        group, _ = asyncio.run(score_group(group, plugins, ctx))
        assert group.samples[0].response == core, "what hooks of plugins read after functions of slime"
        plugins.batch(make_batch(2, "main", [group]), ctx)
        plugins.step_done(StepReport(version=3, stage="main", step=2, of=5, metrics={}, seconds={}), ctx)
        return dict(seen)

    core = later if later in ("cut", "own") else "2"
    recorded = replace(group, samples=[Sample.from_dict(Sample.to_dict(sample)) for sample in group.samples])
    expected = {"hook": hook, "reward": judged, "filter": later, "log": later}
    assert records(group) == expected
    assert records(recorded) == expected, "from the ledger"


def test_an_evaluation_log_function_is_told_of_every_set(write, connect, make_group):
    path = write(
        "CALLS = []\ndef fn(rollout_id, args, data, metrics):\n    CALLS.append((rollout_id, data, metrics))\n"
    )
    plugins, ctx = connect(Config(report={"custom_eval_rollout_log_function_path": f"{path}:fn"}))
    group = scored(make_group(), 1.0, 0.0)
    group.samples[1].status = Status.TRUNCATED
    plugins.evaluated({"held": [group]}, {"held/reward": 0.5}, replace(ctx, evaluation=True))
    from slime_core.plugins.locate import locate

    ((version, data, metrics),) = locate(f"{path}:fn", "key").__globals__["CALLS"]
    assert (version, metrics) == (2, {"held/reward": 0.5})
    assert data["held"]["rewards"] == [1.0, 0.0]
    assert data["held"]["truncated"] == [False, True]
    assert [s.id for s in data["held"]["samples"]] == ["main/5-0", "main/5-1"]


MEGATRON = """
seen = []
def init(args):
    args.n_samples_per_prompt, seen.append(("init", args.advantage_estimator))
def log_prob(args, model, store_prefix):
    seen.append((store_prefix, model))
def step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    seen.append((rollout_id, step_id, model, optimizer, opt_param_scheduler))
"""


def test_functions_of_megatron_ranks_are_called_as_slime_calls_them(write, connect):
    file = write(MEGATRON)
    train = {
        "custom_megatron_init_path": f"{file}:init",
        "custom_megatron_before_log_prob_hook_path": f"{file}:log_prob",
        "custom_megatron_before_train_step_hook_path": f"{file}:step",
    }
    plugins, ctx = connect(Config(train=train))
    plugins.resolve(ctx.config)
    plugins.notify("slime_megatron_init", "a start", ctx, args="settings")
    for role in ("policy", "reference", "teacher", "values"):
        plugins.notify("slime_megatron_before_log_prob", "log-probs", ctx, model=["model"], role=role)
    for step, version in ((5, 2), (6, 2), (7, 3)):
        place = replace(ctx, version=version)
        plugins.notify(
            "slime_megatron_before_train_step", "a step", place, model=["model"], optimizer="optimizer", step=step
        )
    (answer,) = plugins._functions.listeners("slime_megatron_init", ctx.config)
    seen = plugins._functions._locate(
        "train.custom_megatron_init_path", train["custom_megatron_init_path"]
    ).__globals__
    assert answer.provider.name == "custom_megatron_init_path"
    assert seen["seen"] == [
        ("init", "grpo"),
        *((prefix, ["model"]) for prefix in ("", "ref_", "teacher_", "")),
        *((*numbers, ["model"], "optimizer", None) for numbers in ((2, 0), (2, 1), (3, 0))),
    ]


def test_a_megatron_function_of_another_shape_is_refused(by, connect):
    config = by("def fn(args, model):\n    pass\n", custom_megatron_before_log_prob_hook_path=True)
    with pytest.raises(PluginError, match="store_prefix"):
        connect(config)
