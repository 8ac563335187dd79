"""Whole rollouts, evaluations and data sources with slime's signatures."""

import asyncio

import pytest

from slime_core.config.schema import Config
from slime_core.config.sections.data import DataTask
from slime_core.errors import PluginError
from slime_core.types import Status

pytestmark = pytest.mark.unit


ROLLOUT = """
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run


async def _rollout(args, data_buffer):
    state = GenerateState(args)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    return [await generate_and_rm_group(args, group, state.sampling_params) for group in groups]


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    assert not evaluation and rollout_id == 2
    return RolloutFnTrainOutput(samples=run(_rollout(args, data_buffer)), metrics={})


async def reward(args, sample, **kwargs):
    return {"score": float(sample.response_length), "other": 1}
"""


def rollout_config(write, source=ROLLOUT, fn="generate_rollout"):
    path = write(source)
    return Config(
        rollout={"rollout_function_path": f"{path}:{fn}", "rollout_batch_size": 2, "rollout_max_response_len": 5},
        reward={"custom_rm_path": f"{path}:reward", "reward_key": "score"},
    )


def test_a_rollout_function_makes_a_whole_step_by_slimes_own_tools(write, connect, make_group):
    config = rollout_config(write)
    plugins, ctx = connect(config)
    assert plugins.replaces_rollout("default", config)
    groups = [make_group(position=p) for p in (4, 5)]
    done = asyncio.run(plugins.rollout(groups, ctx))
    assert [g.id for g in done] == ["main/4", "main/5"]
    assert [list(g.rollouts) for g in done] == [[8, 9], [10, 11]]
    for sample in (s for g in done for s in g.samples):
        assert sample.reward == sample.response_length > 0
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert len(sample.rollout_log_probs) == len(sample.weight_versions) == sample.response_length


PARTS = """
from slime.utils.types import Sample

def part(sample, index, rollout_id=None, group=True):
    made = Sample(prompt=sample.prompt, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)
    made.group_index, made.index = (sample.group_index if group else None), index
    made.rollout_id, made.response = rollout_id, f"{index}"
    return made
"""


@pytest.mark.parametrize(
    ("made", "rollouts"),
    [
        ("[part(s, s.rollout_id + 1, s.rollout_id) for s in group for _ in (0, 1)]", {8: "99", 9: "1010"}),
        ("[part(s, s.index) for s in reversed(group)]", {8: "8", 9: "9"}),
        ("[part(group[1], None), group[0]]", {8: "8", 9: "None"}),
        ("[part(group[0], 8, group=False)]", "group_index=None"),
        ("[part(group[0], 77) for _ in range(3)]", "none of them free"),
    ],
    ids=["fan-out with its own indices", "the index alone", "new and issued", "no group", "too many"],
)
def test_samples_of_a_rollout_function_take_their_places_by_rollout_id_then_by_index(
    write, connect, make_group, made, rollouts
):
    source = PARTS + (
        "def fn(args, rollout_id, data_buffer, evaluation=False):\n"
        "    (group,) = data_buffer.get_samples(1)\n"
        "    group[0].append_response([3], log_probs=[-1.0])\n"
        "    group[0].reward, group[0].response = 1.0, '8'\n"
        f"    return [{made}]\ndef reward(sample):\n    return 1\n"
    )
    plugins, ctx = connect(rollout_config(write, source, "fn"))
    if isinstance(rollouts, str):
        with pytest.raises(PluginError, match=rollouts):
            asyncio.run(plugins.rollout([make_group(position=4)], ctx))
        return
    (done,) = asyncio.run(plugins.rollout([make_group(position=4)], ctx))
    texts = {name: "".join(done.samples[i].response for i in places) for name, places in done.rollouts.items()}
    assert texts == rollouts


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return judged(data_buffer.get_samples(1))", "PLG59", "main/5"),
        ("return data_buffer.get_samples(2)", "PLG56", "was returned without a reward"),
        ("return [data_buffer.get_samples(1) for _ in iter(int, 1)]", "PLG56", "args.rollout_batch_size"),
        ("return 5", "PLG56", "return a list of groups"),
    ],
    ids=["a group is missing", "no reward", "asks without end", "no samples"],
)
def test_what_a_rollout_function_gets_wrong_is_said(write, connect, make_group, body, code, told):
    source = JUDGED + (
        f"def fn(args, rollout_id, data_buffer, evaluation=False):\n    {body}\ndef reward(sample):\n    return 1\n"
    )
    plugins, ctx = connect(rollout_config(write, source, "fn"))
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.rollout([make_group(position=p) for p in (4, 5)], ctx))
    assert caught.value.code == code
    assert told in str(caught.value)


JUDGED = """
def judged(groups):
    for group in groups:
        for sample in group:
            sample.reward = 1.0
    return groups
"""
WORKER = (
    JUDGED
    + """
import queue, threading
done, workers, ends, turns = queue.Queue(), [], queue.Queue(), threading.Semaphore(0)


def work(data_buffer):
    while True:
        groups = data_buffer.get_samples(1)
        if not groups:
            ends.put(groups)
            turns.acquire()
        for group in judged(groups):
            done.put(group)


def fn(args, rollout_id, data_buffer, evaluation=False):
    if not workers:
        workers.append(threading.Thread(target=work, args=(data_buffer,), daemon=True))
        workers[0].start()
    for _ in range(2):  # the worker meets the end of a step, and goes on in the next
        ends.get()
        turns.release()
    return [done.get() for _ in range(args.rollout_batch_size)]


def reward(sample):
    return 1
"""
)


def test_a_background_worker_that_keeps_its_buffer_meets_the_end_of_a_step_and_gets_the_next_ones(
    write, connect, make_group
):
    plugins, ctx = connect(rollout_config(write, WORKER, "fn"))

    async def two_steps():
        steps = [[make_group(position=p) for p in positions] for positions in ((0, 1), (2, 3))]
        return await asyncio.gather(*(plugins.rollout(groups, ctx) for groups in steps))

    steps = asyncio.run(two_steps())
    assert [[group.id for group in groups] for groups in steps] == [["main/0", "main/1"], ["main/2", "main/3"]]


def evaluated(write, connect, body, sets):
    source = (
        "from slime.rollout.base_types import RolloutFnEvalOutput\nfrom slime.utils.types import Sample\n"
        f"def fn(args, rollout_id, data_buffer, evaluation=False):\n    assert evaluation and rollout_id == 2\n{body}"
    )
    config = Config(eval={"eval_function_path": write(source) + ":fn"}, reward={"reward_key": "score"})
    plugins, ctx = connect(config, evaluation=True)
    assert not plugins.replaces_rollout("default", config)
    assert plugins.evaluates_by_function(config)
    return asyncio.run(plugins.evaluate(sets, ctx))


def test_an_evaluation_function_may_judge_the_issued_samples_of_all_sets_at_once(write, connect, make_group):
    body = """
    import numpy as np, torch
    NUMBERS = {"half": np.float32(0.5), "count": np.int64(2), "mean": torch.tensor(1.5), "curve": np.zeros(2)}
    groups = data_buffer.get_samples(9)
    assert data_buffer.get_samples(1) == []
    data = {}
    for name, group in zip(("easy", "hard"), groups, strict=True):
        data[name] = {"rewards": [0.5, 1.0], "truncated": [True, False], "samples": list(reversed(group))}
    return RolloutFnEvalOutput(data=data, metrics={"wall": 3, "note": "text", **NUMBERS})
"""
    sets, metrics = evaluated(write, connect, body, {"easy": [make_group()], "hard": [make_group()]})
    assert metrics == {"wall": 3.0, "half": 0.5, "count": 2.0, "mean": 1.5}
    for groups in sets.values():
        (group,) = groups
        assert (group.id, group.rollouts) == ("main/5", {11: [0], 10: [1]})
        assert [s.reward for s in group.samples] == [0.5, 1.0]
        assert [s.status for s in group.samples] == [Status.TRUNCATED, Status.COMPLETED]


@pytest.mark.parametrize(
    ("body", "rewards"),
    [
        ("return {'own': {'rewards': [0.5, 1]}}", {"own": [[0.5], [1.0]]}),
        ("return {'own': {'rewards': [1.0], 'truncated': [False], 'samples': [Sample(index=0)]}}", {"own": [[1.0]]}),
        ("return [Sample(prompt='a', reward={'score': 2}), Sample(prompt='b', reward=0.0)]", {"set": [[2.0], [0.0]]}),
        ("return {'own': [[Sample(reward=1), Sample(reward=None)]]}", {"own": [[1.0], [None]]}),
    ],
    ids=["rewards alone", "a set of its own", "a list", "groups with a sample that is not judged"],
)
def test_an_evaluation_function_returns_as_many_samples_as_it_likes(write, connect, make_group, body, rewards):
    sets, _ = evaluated(write, connect, f"    {body}\n", {"set": [make_group()]})
    assert {name: [[s.reward for s in g.samples] for g in groups] for name, groups in sets.items()} == rewards
    assert all(sample.id for groups in sets.values() for group in groups for sample in group.samples)


def test_an_evaluation_functions_lists_must_fit_together(write, connect, make_group):
    with pytest.raises(PluginError, match="'own' with 2 rewards, 1 truncated, 1 samples"):
        evaluated(
            write, connect, "    return {'own': {'rewards': [1, 2], 'samples': [Sample()]}}\n", {"set": [make_group()]}
        )


SOURCE = """
import numpy as np
from slime.utils.types import Sample
class Source:
    def __init__(self, args):
        self.count, self.n = 0, args.n_samples_per_prompt
    def get_samples(self, n):
        groups = []
        for _ in range(n):
            groups.append([self.sample() for _ in range(self.n)])
            self.count += 1
        return groups
    def sample(self):
        return Sample(prompt=f"{self.count}+1=", tokens=np.array([4, 5]), label=str(self.count + 1))
    def __len__(self):
        return 7
"""


def test_a_data_source_by_path_gives_rows_by_number(write, connect):
    config = Config(rollout={"data_source_path": write(SOURCE) + ":Source"})
    plugins, ctx = connect(config)
    rows = plugins.prompts(DataTask(name="default"), ctx)
    assert len(rows) == 7
    assert (rows.at(2).prompt, rows.at(2).label, rows.at(2).tokens) == ("2+1=", "3", [4, 5])
    assert rows.at(0).label == "1"
    assert rows.state()["source"].endswith("Source")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("group[1].prompt = 'other'", "group 0 has samples of different prompts"),
        ("group[0].search_count, group[0].metadata = 0, {'kept': 1}", "attributes search_count"),
    ],
)
def test_what_a_row_of_a_data_source_cannot_hold_is_refused(write, connect, change, told):
    source = SOURCE.replace("            self.count += 1", f"            group = groups[-1]\n            {change}")
    config = Config(rollout={"data_source_path": write(source) + ":Source", "n_samples_per_prompt": 2})
    plugins, ctx = connect(config)
    with pytest.raises(ValueError, match=told):
        plugins.prompts(DataTask(name="default"), ctx).at(0)
