"""A function is found by module or file; what is wrong with the path, the file or the signature is said."""

import asyncio
import math
from dataclasses import replace

import pytest

from slime_core.builtin import score_by_teacher
from slime_core.clusters.engine_set import EngineSet
from slime_core.config.schema import Config
from slime_core.config.sections.data import DataTask
from slime_core.config.sections.reward import RewardSection
from slime_core.config.sections.rollout import RolloutSection
from slime_core.errors import PluginError
from slime_core.plugins import load_plugins
from slime_core.plugins.locate import locate
from slime_core.testing.fakes import FakeEngine
from slime_core.types import Status

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("form", ["{folder}/mine.py:fn", "json:dumps", "json.dumps", "os.path:join", "os.path.join"])
def test_files_and_modules_are_found_in_every_documented_form(write, tmp_path, form):
    write("def fn(sample):\n    return 1\n")
    assert callable(locate(form.format(folder=tmp_path), "reward.custom_rm_path"))


def test_a_file_is_looked_for_in_the_current_folder(write, tmp_path, monkeypatch):
    write("def fn(sample):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert locate("mine.py:fn", "key")(None) == 1


def test_a_file_is_imported_once_and_may_import_its_neighbours(write):
    write("VALUE = 3\n", "neighbour_of_mine.py")
    path = write("import neighbour_of_mine\ndef one():\n    return neighbour_of_mine\ndef two():\n    return one()\n")
    assert locate(f"{path}:one", "key")() is locate(f"{path}:two", "key")()


def test_a_relative_import_of_a_file_names_what_lies_beside_it(write, tmp_path):
    (tmp_path / "__init__.py").write_text("raise ValueError")
    write("from .second_neighbour import VALUE\n", "first_neighbour.py")
    write("VALUE = 3\n", "second_neighbour.py")
    path = write("from .first_neighbour import VALUE\ndef fn():\n    return VALUE\n")
    assert locate(f"{path}:fn", "key")() == 3


@pytest.mark.parametrize(
    ("path", "code", "why", "fix"),
    [
        ("{folder}/mien.py:reward", "PLG51", "mine.py", "did you mean 'mine.py'?"),
        ("{folder}/mine.py:rewards", "PLG51", "it defines: Judge, reward", "did you mean 'reward'?"),
        ("no_such_package.part:reward", "PLG51", "neither installed nor in the current folder", "file.py:function"),
        ("json:no_such_name", "PLG51", "it defines:", "define no_such_name there"),
        ("reward", "PLG51", "", "pkg.mod:function"),
    ],
    ids=["file", "function of a file", "module", "function of a module", "no path at all"],
)
def test_what_cannot_be_found_lists_what_is_there(write, tmp_path, path, code, why, fix):
    write("class Judge: pass\ndef reward(sample): pass\ndef _hidden(): pass\n")
    with pytest.raises(PluginError) as caught:
        locate(path.format(folder=tmp_path), "reward.custom_rm_path")
    assert caught.value.code == code
    assert "reward.custom_rm_path" in str(caught.value)
    assert why in caught.value.why
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("import no_such_package\n", "module 'no_such_package' is missing", 1),
        ("def broken(:\n", "SyntaxError", 1),
        ("x = 1\nraise SystemExit(2)\n", "SystemExit", 2),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_with_its_line(write, source, what, line):
    path = write(source)
    with pytest.raises(PluginError) as caught:
        locate(f"{path}:fn", "reward.custom_rm_path")
    assert caught.value.code == "PLG50"
    assert what in caught.value.what
    assert caught.value.where.endswith(f"mine.py:{line}")


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("import slime.backends.megatron_utils.actor\n", "docs/compat.md"),
        ("from examples.geo3k import x\n", "PYTHONPATH"),
        ("import no_such_package.part\n", "install the package of the module no_such_package"),
    ],
)
def test_the_fix_of_a_missing_module_names_no_strangers_package(by, connect, source, fix):
    with pytest.raises(PluginError) as caught:
        connect(by(source + "def fn(args, sample):\n    return 1.0\n", custom_rm_path=True))
    assert fix in caught.value.fix
    assert "pip install" not in caught.value.fix


def test_modules_without_a_file_are_no_failure_of_ours(connect):
    """A served module, which lacks the name; and a function of one that is frozen into Python."""
    with pytest.raises(PluginError) as caught:
        connect(Config(reward={"custom_rm_path": "slime.rollout.sglang_rollout.nobody"}))
    assert (caught.value.code, caught.value.where) == ("PLG51", "slime.rollout.sglang_rollout")
    plugins, _ = connect(Config(reward={"custom_rm_path": "os.path.exists"}))
    assert "custom_rm_path" in str(plugins.routing())
    plugins.fingerprint()


def test_slimes_default_paths_mean_the_cores_own_way():
    rollout = {
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "data_source_path": "slime.rollout.data_source:RolloutDataSourceWithBuffer",
        "buffer_filter_path": "slime.rollout.data_source.pop_first",
    }
    assert Config(rollout=rollout, eval={"eval_function_path": rollout["rollout_function_path"]}) == Config()


def test_slimes_custom_loss_is_the_policy_loss_that_a_function_replaces():
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": "mine.py:loss"}
    assert Config(train=custom).train.loss_type == "policy_loss"
    assert Config(train={"loss_type": "custom_loss"}).train.loss_type == "custom_loss", "no loss of that name: CFG04"


@pytest.mark.parametrize(
    ("key", "signature", "expected"),
    [
        ("custom_rm_path", "(args, sample, tokenizer)", "def fn(args, sample)"),
        ("custom_generate_function_path", "(args, sample)", "def fn(args, sample, sampling_params)"),
        ("dynamic_sampling_filter_path", "(args)", "def fn(args, samples)"),
        ("rollout_function_path", "(args, rollout_id, data_buffer)", "evaluation=..."),
        ("custom_reward_post_process_path", "(samples)", "def fn(args, samples)"),
        ("custom_tis_function_path", "(args)", "pg_loss=..."),
    ],
)
def test_a_signature_that_slime_could_not_call_is_refused_at_start(by, key, signature, expected):
    with pytest.raises(PluginError) as caught:
        load_plugins(by(f"def fn{signature}: pass\n", **{key: True}))
    assert caught.value.code == "PLG53"
    assert expected in caught.value.fix
    assert "mine.py:1" in caught.value.where


REWARDS = {
    "plain": "def fn(sample):\n    return len(sample.label)\n",
    "plain async": "async def fn(sample):\n    return len(sample.label)\n",
    "plain with ctx": "def fn(sample, ctx):\n    return len(sample.label) if ctx.version == 2 else 0\n",
    "args": "def fn(args, sample):\n    return len(sample.label) if args.n_samples_per_prompt == 8 else 0\n",
    "args async": "async def fn(args, sample, **kwargs):\n    return len(sample.label)\n",
    "returns a coroutine": "async def later(s):\n    return len(s.label)\ndef fn(args, sample, **kw):\n    return later(sample)\n",
    "like the hook": "def fn(group, ctx):\n    return [len(s.label) for s in group.samples]\n",
}


@pytest.mark.parametrize("source", REWARDS.values(), ids=REWARDS.keys())
def test_a_reward_function_may_have_any_documented_shape(by, connect, make_group, source):
    plugins, ctx = connect(by(source, custom_rm_path=True))
    assert [r.value for r in asyncio.run(plugins.reward(make_group(label="two"), ctx))] == [3.0, 3.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_group_reward_sees_all_samples(by, connect, make_group, kind):
    source = f"{kind} fn(args, samples, **kwargs):\n    return [i + len(samples) for i, s in enumerate(samples)]\n"
    plugins, ctx = connect(by(source, custom_rm_path=True, group_rm=True))
    assert [r.value for r in asyncio.run(plugins.reward(make_group(n=3), ctx))] == [3.0, 4.0, 5.0]


def test_a_group_reward_of_another_length_is_refused(by, connect, make_group):
    plugins, ctx = connect(by("def fn(args, samples):\n    return [1.0]\n", custom_rm_path=True, group_rm=True))
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.reward(make_group(n=3), ctx))
    assert caught.value.code == "PLG59"


def test_rows_may_be_a_function_that_is_written_like_the_hook(write, connect):
    path = write(
        "from slime_core import Prompt\n"
        "class Rows:\n"
        "    def __len__(self): return 2\n"
        "    def at(self, position): return Prompt(id='', prompt=f'{position}+1=', label=str(position + 1))\n"
        "    def state(self): return {}\n"
        "def rows(task, ctx):\n"
        "    return Rows()\n"
    )
    plugins, ctx = connect(Config(rollout=RolloutSection(data_source_path=f"{path}:rows")))
    found = plugins.prompts(DataTask(name="default"), ctx)
    assert [found.at(row).label for row in range(len(found))] == ["1", "2"]


def test_a_function_that_raises_is_told_with_its_own_line(by, connect, make_group):
    plugins, ctx = connect(by("def fn(sample):\n    x = 1\n    return x / 0\n", custom_rm_path=True))
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.reward(make_group(), ctx))
    assert caught.value.code == "PLG56"
    assert "mine.py:3" in caught.value.where
    assert "custom_rm_path" in caught.value.what


def test_a_list_of_samples_is_fan_out_that_shares_its_rollout_and_is_judged_together(write, connect, make_group):
    source = """
import copy
async def fn(args, sample, sampling_params):
    made = []
    for part in range(2):
        one = copy.deepcopy(sample)
        one.append_response([5 + part], log_probs=[-1.0])
        one.status = sample.Status.COMPLETED
        made.append(one)
    return made
"""
    judge = "def fn(args, samples):\n    return [float(len(samples) + i) for i in range(len(samples))]\n"
    config = Config(
        rollout=RolloutSection(custom_generate_function_path=write(source, "gen.py") + ":fn"),
        reward=RewardSection(custom_rm_path=write(judge, "judge.py") + ":fn"),
    )
    plugins, ctx = connect(config)
    group = make_group()

    async def both_hooks():
        done = await plugins.generate(group, ctx)
        return done, await plugins.reward(done, ctx)

    done, rewards = asyncio.run(both_hooks())
    assert done.rollouts == {10: [0, 1], 11: [2, 3]}
    assert [s.response_tokens for s in done.samples] == [[5], [6], [5], [6]]
    assert [r.value for r in rewards] == [2.0, 3.0, 2.0, 3.0]


def test_a_sample_without_samples_is_aborted(by, connect, make_group):
    plugins, ctx = connect(by("async def fn(args, sample, params): return []\n", custom_generate_function_path=True))
    done = asyncio.run(plugins.generate(make_group(), ctx))
    assert [sample.status for sample in done.samples] == [Status.ABORTED] * 2
    assert done.rollouts == {10: [0], 11: [1]}


@pytest.mark.parametrize(("group_rm", "rewards"), [(False, [7.0, 0.0]), (True, [0.0, 0.0])])
def test_a_reward_that_generate_sets_is_kept_where_a_reward_type_judges_the_others(
    by, connect, make_group, group_rm, rewards
):
    source = (
        "async def fn(args, sample, sampling_params):\n"
        "    sample.append_response([1], log_probs=[-1.0], text='no')\n"
        "    sample.reward = 7 if sample.index % 2 == 0 else None\n    return sample\n"
    )
    config = by(source, custom_generate_function_path=True, rm_type="math", group_rm=group_rm)
    plugins, ctx = connect(config.model_copy(update={"plugins": ("rm_math",)}))

    async def both_hooks():
        return await plugins.reward(await plugins.generate(make_group(), ctx), ctx)

    assert [reward.value for reward in asyncio.run(both_hooks())] == rewards


def test_a_generate_function_that_returns_no_sample_is_refused(by, connect, make_group):
    plugins, ctx = connect(
        by("async def fn(args, sample, sampling_params):\n    return None\n", custom_generate_function_path=True)
    )
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.generate(make_group(), ctx))
    assert "return the sample" in caught.value.what


def test_generate_is_told_of_evaluation_where_it_asks(by, connect, make_group):
    source = (
        "async def fn(args, sample, sampling_params, evaluation=False):\n"
        "    sample.metadata['evaluation'] = evaluation\n    sample.metadata['params'] = sampling_params\n    return sample\n"
    )
    plugins, ctx = connect(by(source, custom_generate_function_path=True), evaluation=True)
    (sample, _) = asyncio.run(plugins.generate(make_group(), ctx)).samples
    assert sample.metadata["evaluation"] is True
    assert sample.metadata["params"]["max_new_tokens"] == 64
    assert sample.metadata["params"]["top_k"] == -1


def test_a_sync_generate_function_runs_beside_the_loop(by, connect, make_group):
    source = (
        "import threading\ndef fn(args, sample, sampling_params):\n"
        "    sample.metadata['main'] = threading.current_thread() is threading.main_thread()\n"
        "    sample.append_response([1], log_probs=[-1.0])\n    return sample\n"
    )
    plugins, ctx = connect(by(source, custom_generate_function_path=True))
    samples = asyncio.run(plugins.generate(make_group(), ctx)).samples
    assert [s.metadata["main"] for s in samples] == [False, False]
    assert all(s.status == "completed" for s in samples)


class TextEngine(FakeEngine):
    """An engine of a plugin that knows no pictures."""

    async def score(self, tokens, start):
        return await super().score(tokens, start)


def test_texts_without_log_probs_are_scored_also_by_engines_that_know_no_pictures(by, connect, make_group):
    source = (
        "async def fn(args, sample, sampling_params):\n"
        "    sample.tokens += [1, 2]\n    sample.response_length = 2\n    sample.status = sample.Status.COMPLETED\n    return sample\n"
    )
    plugins, ctx = connect(by(source, custom_generate_function_path=True))
    engine = TextEngine(vocab_size=16)
    for one in (engine, EngineSet([engine, engine])):
        seen = replace(ctx, engine=one, engines={"teacher": one})
        for sample in asyncio.run(plugins.generate(make_group(), seen)).samples:
            assert sample.rollout_log_probs == pytest.approx([-math.log(16)] * 2)
            sample.temperature = 1.0
            asyncio.run(score_by_teacher(sample, seen))
            assert sample.teacher_log_probs == sample.rollout_log_probs


@pytest.fixture
def alone(monkeypatch):
    """Nothing but the core is installed."""
    monkeypatch.setattr("slime_core.plugins.backends.available", list)


INSTALL = "pip install -e plugins/slime_compat"


def test_a_function_that_imports_slime_names_the_package_that_serves_it(alone, by):
    with pytest.raises(PluginError, match=r"slime-compat serves slime, and is not installed here") as caught:
        load_plugins(by("from slime.utils.types import Sample\ndef fn(sample): return 1", custom_rm_path=True))
    assert caught.value.code == "PLG50"
    assert caught.value.fix.startswith(INSTALL)


def test_a_function_that_imports_slime_when_it_is_called_names_it_too(alone, by, connect, make_group):
    plugins, ctx = connect(by("def fn(sample):\n    import slime.utils\n    return 1", custom_rm_path=True))
    with pytest.raises(PluginError, match=f"slime-compat serves slime, and is not installed here: {INSTALL}"):
        asyncio.run(plugins.reward(make_group(), ctx))


@pytest.mark.parametrize("read", ["args.sglang_router_ip", "args.sglang_router_port", "copy(args).sglang_router_ip"])
def test_a_function_that_reads_the_engines_address_names_it_too(alone, by, connect, make_group, read):
    source = f"from copy import copy\nasync def fn(args, sample, **kwargs):\n    return {read} and 1"
    plugins, ctx = connect(by(source, custom_rm_path=True))
    with pytest.raises(PluginError, match=r"args\.sglang_router_ip needs slime-compat") as caught:
        asyncio.run(plugins.reward(make_group(), ctx))
    assert caught.value.fix.startswith(INSTALL)


def test_any_other_function_runs_without_the_package(alone, by, connect, make_group):
    source = "from copy import copy\nasync def fn(args, sample, **kwargs):\n    return copy(args).lr"
    plugins, ctx = connect(by(source, custom_rm_path=True))
    assert {reward.value for reward in asyncio.run(plugins.reward(make_group(), ctx))} == {Config().train.lr}
