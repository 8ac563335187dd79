"""Unfinished surplus goes on in the next step: the same tokens, each with the weights that made it, and no work twice."""

import asyncio
from zlib import crc32

import pytest

from slime_core.rollout.partial_rollout import mask_older
from slime_core.seeds import seed_of
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Sample

pytestmark = pytest.mark.unit

PARTIAL = ("--over-sampling-batch-size", "6", "--partial-rollout")
FREE = ("--async-schedule", "free")
MASK = "--mask-offpolicy-in-partial-rollout"
COUNTED = """
import slime_core

seen = {}


@slime_core.hookimpl
def slime_reward(group, ctx):
    seen[group.id] = seen.get(group.id, 0) + 1
    newest = max(v for s in group.samples for v in s.weight_versions)
    ahead = ctx.config.rollout.async_schedule == "free"  # training may have moved on since the last token
    assert newest <= ctx.version <= newest + ahead, "the version in training"
    return [float(i) for i in range(len(group.samples))]
"""


def uninterrupted(name, limit=32, vocab=16):
    """The tokens that a sample has where nothing stops it: a function of the seed."""
    seed, tokens = seed_of(5, "sample", name, 0), []
    while len(tokens) < limit and 0 not in tokens:
        tokens.append(seed_of(seed, 4 + len(tokens)) % vocab)
    return tokens


class Recorded(FakeEngine):
    """Keeps every request and answer, and may serve some late."""

    def __init__(self, slow=lambda name: 0):
        super().__init__(vocab_size=16)
        self.answers, self.slow = [], slow

    async def generate(self, request):
        for _ in range(self.slow(request.id)):
            await asyncio.sleep(0)
        done = await super().generate(request)
        self.answers.append((request, done))
        return done


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_continued_response_is_the_uninterrupted_one(collect, schedule):
    ran = collect(*PARTIAL, "--async-schedule", schedule, steps=5, engine=Recorded(lambda n: crc32(n.encode()) % 50))
    samples = [s for step in ran.steps for group in step for s in group.samples]
    mixed = [s for s in samples if len(set(s.weight_versions)) > 1]
    assert mixed, "nothing was ever continued"
    for sample in samples:
        assert sample.response_tokens == uninterrupted(sample.id)
        assert len(sample.rollout_log_probs) == sample.response_length
        assert sample.weight_versions == sorted(sample.weight_versions)
        assert sample.attempt == 0
    for sample in mixed:
        assert sample.response == CharTokenizer().decode(sample.response_tokens), "the text is of the whole response"


def test_no_token_is_generated_twice(collect):
    engine = Recorded()
    ran = collect(*PARTIAL, steps=5, engine=engine)
    drawn = {}
    for request, done in engine.answers:
        for k in range(len(done.tokens)):
            key = (request.id, len(request.tokens) + k)
            assert key not in drawn, f"{key} was drawn twice"
            drawn[key] = done.versions[k]
        assert request.kept == len(request.tokens) - 4, "stop strings look back over what was kept"
    for step in ran.steps:
        for sample in (s for group in step for s in group.samples):
            assert [drawn[sample.id, 4 + k] for k in range(sample.response_length)] == sample.weight_versions


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_every_group_is_judged_once(collect, schedule):
    ran = collect(*PARTIAL, "--async-schedule", schedule, plugin=COUNTED, steps=5)
    import sys

    seen = sys.modules["judge_plugin_module"].seen
    assert set(seen.values()) == {1}
    assert {group.id for step in ran.steps for group in step} <= set(seen)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_no_sample_is_lost_and_what_is_left_in_the_end_is_dropped(collect, schedule):
    ran = collect(*PARTIAL, "--async-schedule", schedule, steps=4)
    counts = ran.balance()
    assert counts["trained"] == 4 * 2 * 2
    assert counts["issued"] == (6 + 2 + 2 + 2) * 2, "a step issues what the last one trained"
    assert counts["dropped/over_sampled"] == 4 * 2
    assert counts["pending"] == 0
    assert [sum(c.drops.values()) for c in ran.counts] == [0, 0, 0, 8]


def test_what_was_left_over_goes_before_new_prompts_that_end_no_earlier(collect):
    ran = collect(*PARTIAL, steps=6)
    taken = [group.prompt.position for step in ran.steps for group in step]
    assert len(set(taken)) == len(taken)
    first = {
        position: step for step, groups in enumerate(ran.steps) for position in [g.prompt.position for g in groups]
    }
    longest = {p: max(len(uninterrupted(f"main/{p}-{j}")) for j in range(2)) for p in range(6)}
    order = sorted(range(6), key=lambda p: (longest[p], p))
    steps = [first.get(p, 99) for p in order]
    assert steps == sorted(steps), "of prompts that start together the shorter are taken earlier"


def test_finished_surplus_is_taken_first(collect):
    ran = collect("--over-sampling-batch-size", "8", "--partial-rollout", "--rollout-max-response-len", "1", steps=3)
    assert ran.ids() == [["main/0", "main/1"], ["main/2", "main/3"], ["main/4", "main/5"]]
    versions = [{v for g in step for s in g.samples for v in s.weight_versions} for step in ran.steps]
    assert versions == [{0}, {0}, {0}], "they were finished in the first step"
    assert [c.metrics["rollout/offpolicy_tokens"] for c in ran.counts] == [0.0, 1.0, 1.0]


def test_metrics_count_what_was_continued(collect):
    ran = collect(*PARTIAL, steps=5)
    for version, (step, counts) in enumerate(zip(ran.steps, ran.counts)):
        made = [s.weight_versions for group in step for s in group.samples]
        older = sum(v < version for row in made for v in row) / sum(map(len, made))
        assert counts.metrics["rollout/offpolicy_tokens"] == older
        assert counts.metrics["rollout/continued_samples"] == sum(len(set(row)) > 1 for row in made)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_tokens_of_older_weights_are_masked_where_that_is_asked_for(collect, schedule):
    ran = collect(*PARTIAL, MASK, "--async-schedule", schedule, steps=5)
    masked = 0
    for sample in (s for step in ran.steps for group in step for s in group.samples):
        newest = max(sample.weight_versions)
        assert sample.loss_mask == [int(v == newest) for v in sample.weight_versions]
        assert ran.ledger.rows[sample.id].sample.loss_mask == sample.loss_mask
        masked += sample.loss_mask.count(0)
    assert masked


def test_a_tools_tokens_and_a_sample_of_one_version_keep_their_mask():
    sample = Sample(id="a", tokens=[1])
    sample.append_response([1, 2], log_probs=[-1, -1], version=[3, 3])
    sample.append_response([5], mask=0)
    mask_older([sample])
    assert sample.loss_mask == [1, 1, 0]
    sample.append_response([9], log_probs=[-1])  # of no weights, and yet trainable
    sample.append_response([6, 7], log_probs=[-1, -1], version=[3, 4])
    mask_older([sample])
    assert sample.loss_mask == [0, 0, 0, 1, 0, 1]
    empty = Sample(id="b", tokens=[1], loss_mask=[])
    mask_older([empty])
    assert empty.loss_mask == []


PLUGIN = """
import asyncio
import slime_core

turns = []

@slime_core.hookimpl
async def slime_generate(group, ctx):
    async def play(sample):
        await ctx.generate(sample)
        turns.append((sample.id, 1))
        for _ in range(40):
            await asyncio.sleep(0)                     # a tool
        sample.append_response([2, 3], mask=0, text="tool")
        await ctx.generate(sample)
        turns.append((sample.id, 2))
    await asyncio.gather(*(play(sample) for sample in group.samples))
    return group

@slime_core.hookimpl
def slime_reward(group, ctx):
    return [float(i) for i in range(len(group.samples))]
"""


def test_a_plugin_of_several_turns_waits_inside_generate_and_goes_on(collect):
    ran = collect(*PARTIAL, *FREE, plugin=PLUGIN, steps=6, engine=Recorded(lambda n: crc32(n.encode()) % 60))
    import sys

    turns = sys.modules["judge_plugin_module"].turns
    assert len(turns) == len(set(turns)), "a turn was played twice"
    samples = [s for step in ran.steps for group in step for s in group.samples]
    assert any(len({v for v in s.weight_versions if v >= 0}) > 1 for s in samples)
    for sample in samples:
        assert sample.attempt == 0
        assert sample.loss_mask == [int(v >= 0) for v in sample.weight_versions]
        made = [v for v in sample.weight_versions if v >= 0]
        assert made == sorted(made)
    counts = ran.balance()
    assert (counts["trained"], counts["pending"]) == (24, 0)


SIBLINGS = PLUGIN.replace(
    """        sample.append_response([2, 3], mask=0, text="tool")
        await ctx.generate(sample)
""",
    """        twin = slime_core.Sample(id=f"{sample.id}.1", tokens=[*sample.tokens, 2, 3], rollout_id=sample.rollout_id)
        await ctx.generate(twin, request_id=sample.id)
        group.rollouts[sample.rollout_id].append(len(group.samples))
        group.samples.append(twin)
""",
)


def test_a_later_turn_that_is_a_sample_of_its_own_is_stopped_and_goes_on_like_its_rollout(collect):
    engine = Recorded(lambda n: crc32(n.encode()) % 60)
    ran = collect(*PARTIAL, *FREE, plugin=SIBLINGS, steps=6, engine=engine)
    samples = {s.id: s for step in ran.steps for group in step for s in group.samples}
    twins = [s for s in samples.values() if s.id.endswith(".1")]
    stopped = [
        request.kept
        for twin in twins
        for request, _ in engine.answers
        if request.tokens[: twin.prompt_length] == twin.tokens[: twin.prompt_length] and request.kept
    ]
    assert stopped, "no second turn went on after a stop"
    assert all(s.response_tokens != samples[s.id[:-2]].response_tokens for s in twins if s.response_length > 3)


@pytest.mark.parametrize("flags", [(), (MASK,)], ids=["plain", "masked"])
def test_two_runs_are_the_same_whatever_the_engine_does(collect, flags):
    one = collect(*PARTIAL, *flags, steps=6)
    two = collect(*PARTIAL, *flags, steps=6, engine=Recorded(lambda name: crc32(name.encode()) % 90))
    assert one.payload() == two.payload()
    assert [c.metrics for c in one.counts] == [c.metrics for c in two.counts]


DOOR = """
from slime.utils.http_utils import post


async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    asked = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    made = await post(url, asked)
    log_probs = [entry[0] for entry in made["meta_info"]["output_token_logprobs"]]
    sample.append_response_tokens(
        args, tokens=made["output_ids"], log_probs=log_probs, text=made["text"], meta_info=made["meta_info"]
    )
    return sample
"""


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "dropped"])
@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_functions_that_post_to_the_server_lose_nothing(collect, tmp_path, schedule, partial):
    (tmp_path / "door.py").write_text(DOOR)
    flags = ("--custom-generate-function-path", f"{tmp_path / 'door.py'}:generate", "--async-schedule", schedule)
    over = PARTIAL if partial else PARTIAL[:2]
    ran = collect(*over, *flags, steps=3)
    counts = ran.balance()
    assert (counts["trained"], counts["pending"]) == (12, 0)
    assert counts["dropped/over_sampled"] == counts["issued"] - 12
    if schedule == "lockstep":
        again = collect(*over, *flags, steps=3)
        assert again.ids() == ran.ids()
        tokens = [[s.tokens for group in step for s in group.samples] for step in ran.steps]
        assert [[s.tokens for group in step for s in group.samples] for step in again.steps] == tokens
