"""Runs that are ahead, on a fake engine whose groups are quick or slow by chance: the bound holds, and nothing is lost.

The engine generates on while a step "trains" between `take` and `admit`.
"""

import asyncio
import random
import sys
from dataclasses import dataclass, field

import pytest

from durability.memory_ledger import MemoryLedger
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.plugins import load_plugins
from slime_core.report.metrics import rollout_metrics
from slime_core.resume import positions
from slime_core.rollout.collector import Collector
from slime_core.rollout.groups import OpenGroup, OpenGroups, Source, training_params
from slime_core.rollout.staleness import Staleness, trained_versions
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.trainers.batch import make_batch
from slime_core.types import Completion, Group, Prompt, Sample, WeightUpdate

pytestmark = pytest.mark.unit

VOCAB = 16
BATCH = 2
JUDGE = """
import asyncio
import random
import slime_core
from slime_core import Drop

chance = random.Random(0)
judged = []


@slime_core.hookimpl
async def slime_reward(group, ctx):
    judged.extend(sample.status.value for sample in group.samples)
    for _ in range(chance.choice([0, 0, 0, 40, 200])):
        await asyncio.sleep(0)
    return [float(sum(s.response_tokens) % 3) for s in group.samples]


@slime_core.hookimpl
def slime_filter(group, ctx):
    return Drop(reason="odd") if chance.random() < 0.15 else None
"""


class Prompts(Source):
    """Positions from 0, without end."""

    def __init__(self):
        self.position = 0

    def next(self, count):
        first, self.position = self.position, self.position + count
        return [
            Prompt(id=f"main/{p}", position=p, prompt="1+2=", tokens=[2, 11, 3, 13])
            for p in range(first, self.position)
        ]

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


class Uneven(FakeEngine):
    """Some requests take many turns of the event loop a token, others one."""

    def __init__(self, seed):
        super().__init__(vocab_size=VOCAB)
        self.chance, self.paces = random.Random(seed), {}
        self.ended = []  # (request id, tokens, finish)

    async def _decode(self, request, out):
        pace = self.paces.setdefault((request.id, request.seed), self.chance.choice([1, 1, 2, 9, 30]))
        try:
            while len(out.tokens) < request.params.max_new_tokens:
                for _ in range(pace):
                    await asyncio.sleep(0)
                    if request.id in self._aborted:
                        out.finish = "abort"
                        return
                self._draw(request, out)
        finally:
            self.ended.append((request.id, len(out.tokens), out.finish))


@dataclass
class Ran:
    steps: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    events: list = field(default_factory=list)
    ended: list = field(default_factory=list)  # requests: id, tokens, finish
    ledger: MemoryLedger = field(default_factory=MemoryLedger)

    def total(self, name):
        return sum(metrics.get(name, 0.0) for metrics in self.metrics)


async def _steps(config, plugins, ran, steps, seed, known=None):
    """``known`` is the ledger of a run that was cut: its recorded steps are made again."""
    chance, engine = random.Random(seed), Uneven(seed)
    ran.ended = engine.ended
    ctx = Context(config=config, engine=engine, tokenizer=CharTokenizer(), sampling=training_params(config))
    await engine.load(WeightUpdate(version=0, epoch=1, transport="tensors"))
    collector = Collector(
        source=Prompts(),
        ledger=ran.ledger,
        plugins=plugins,
        ctx=ctx,
        vocab_size=VOCAB,
        steps=steps,
        resumed=known is not None,
    )
    async with collector:
        for version in range(steps):
            groups = await collector.take(BATCH, positions(await ran.ledger.composition(version + 1)))
            ran.steps.append(groups)
            await ran.ledger.journal(make_batch(version, "main", groups))
            first = len(engine.ended)
            for _ in range(chance.choice([5, 100, 400])):
                await asyncio.sleep(0)  # it trains
            ran.events.append(len(engine.ended) - first)
            await ran.ledger.trained(version + 1, f"w{version + 1}")
            if config.rollout.async_schedule == "lockstep":
                await collector.drain()
            await engine.load(WeightUpdate(version=version + 1, epoch=1, transport="tensors"))
            counts = collector.pop_counts()
            ran.metrics.append(rollout_metrics(groups, version, counts.drops, counts.issued) | counts.metrics)
            open_ = collector.state()["open"]
            assert sorted({*collector._in_flight, *collector._finished}) == open_
            collector.admit(version + 1)


@pytest.fixture
def ahead(install_plugin):
    """Run steps ahead of training: ``ahead(most, policy, seed, *flags)``."""
    installed = []

    def run(most, policy, seed, *flags, steps=14, schedule="free", plugin=JUDGE, known=None):
        if not installed:
            install_plugin("judge", plugin)
            installed.append(True)
        given = [
            *("--hf-checkpoint", ".", "--plugin", "judge", "--rollout-batch-size", BATCH, "--no-colocate"),
            *("--n-samples-per-prompt", 2, "--rollout-max-response-len", 24, "--seed", 5),
            *("--max-staleness", most, "--async-schedule", schedule, "--stale-policy", policy),
        ]
        config = load_config(None, [*map(str, given), *flags])
        plugins = load_plugins(config)
        ran = Ran() if known is None else Ran(ledger=known)
        asyncio.run(asyncio.wait_for(_steps(config, plugins, ran, steps, seed, known), 30))
        plugins.close()
        return ran

    return run


def _ages(ran):
    """Of each group that trained: the step minus the lowest version among its trainable tokens."""
    return [
        version - min((v for sample in group.samples for v in trained_versions(sample)), default=version)
        for version, groups in enumerate(ran.steps)
        for group in groups
    ]


def _counts(ran):
    counts = dict(asyncio.run(ran.ledger.counts()))
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    assert counts["issued"] == counts["trained"] + counts["pending"] + dropped, counts
    return counts


@pytest.mark.parametrize("policy", ["wait", "restart", "mask", "drop"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_group_that_trains_is_older_than_the_bound_and_every_sample_has_one_end(most, policy, ahead):
    seen, given_up = set(), 0
    for seed in range(2):
        ran = ahead(most, policy, seed)
        assert [len(groups) for groups in ran.steps] == [BATCH] * 14
        ages = _ages(ran)
        assert max(ages) <= most
        assert max(metrics["staleness/max"] for metrics in ran.metrics) == max(ages)
        for metrics in ran.metrics:
            assert f"staleness/{most + 1}" not in metrics
            assert sum(metrics[f"staleness/{age}"] for age in range(most + 1)) == pytest.approx(1)
            assert sum(metrics[f"staleness/tokens/{age}"] for age in range(most + 1)) == pytest.approx(1)
        counts = _counts(ran)
        assert counts["pending"] == 0, "the last step leaves nothing open"
        reason = {"restart": "dropped/restarted", "drop": "dropped/stale", "mask": "dropped/stale"}.get(policy)
        assert {name for name in counts if name.startswith("dropped/")} <= {"dropped/odd", reason}
        if policy in ("restart", "drop"):
            kind = "restarted" if policy == "restart" else "dropped"
            assert ran.total(f"stale/{kind}") == counts.get(reason, 0)
            by_length = sum(ran.total(f"stale/{kind}/len_{a}") for a in ("0_64", "64_128"))
            assert by_length == ran.total(f"stale/{kind}")
            given_up += ran.total(f"stale/{kind}")
        if policy == "mask":
            masked = [s for groups in ran.steps for group in groups for s in group.samples if 0 in s.loss_mask]
            assert ran.total("stale/masked") == len(masked)
            given_up += len(masked)
        seen |= set(ages)
    assert most in seen, "the bound was never reached"
    assert (given_up > 0) == (policy != "wait")


@pytest.mark.parametrize("policy", ["wait", "restart", "mask", "drop"])
def test_a_run_that_goes_on_makes_recorded_steps_again_as_they_were_and_keeps_the_bound_after_them(policy, ahead):
    """The bound has no say in recorded steps; what was masked is masked again, what was given up stays so."""
    first = ahead(1, policy, 1, steps=9)
    for version in (8, 9):  # two steps were not recorded
        for name in first.ledger.journals.pop(version):
            first.ledger.rows[name].state, first.ledger.rows[name].step = "finished", None
        del first.ledger.made[version], first.ledger.fingerprints[version]
    asyncio.run(first.ledger.rewind(0))
    before = {name for name, row in first.ledger.rows.items() if row.state == "dropped"}
    again = ahead(1, policy, 7, known=first.ledger)
    for old, new in zip(first.steps[:7], again.steps[:7], strict=True):
        assert [s.to_dict() for g in old for s in g.samples] == [s.to_dict() for g in new for s in g.samples]
    assert max(_ages(again)) <= 1
    assert [len(groups) for groups in again.steps] == [BATCH] * 14
    assert _counts(again)["pending"] == 0
    assert before <= {name for name, row in again.ledger.rows.items() if row.state == "dropped"}


def test_what_is_masked_is_exactly_what_is_older_than_the_bound_and_the_ledger_keeps_it_as_it_was_made(ahead):
    ran = ahead(1, "mask", 1)
    for version, groups in enumerate(ran.steps):
        for sample in (s for group in groups for s in group.samples):
            assert sample.loss_mask == [int(v >= version - 1) for v in sample.weight_versions]
            stored = ran.ledger.rows[sample.id].sample
            assert stored.loss_mask == [1] * 24
            assert stored.weight_versions == sample.weight_versions


def test_a_group_that_begins_again_is_the_next_attempt_with_draws_of_its_own(ahead):
    ran = ahead(1, "restart", 2)
    again = [sample for groups in ran.steps for group in groups for sample in group.samples if sample.attempt]
    assert again
    older = {(row.sample.id, row.sample.attempt): row for row in ran.ledger.older}
    for sample in again:
        assert all((sample.id, attempt) in older for attempt in range(sample.attempt))
        assert {older[sample.id, attempt].reason for attempt in range(sample.attempt)} == {"restarted"}
        assert len(sample.response_tokens) == 24


def test_what_is_dropped_on_its_way_is_stopped_on_the_engine_and_its_tokens_so_far_are_counted(ahead):
    ran = ahead(1, "drop", 0)
    stopped = {name: tokens for name, tokens, finish in ran.ended if finish == "abort"}
    assert stopped
    assert {ran.ledger.rows[name].reason for name in stopped} == {"stale"}
    assert "aborted" not in sys.modules["judge_plugin_module"].judged

    staleness = Staleness(
        load_config(None, ["--max-staleness", "1", "--no-colocate", "--async-schedule", "free"]), OpenGroups()
    )
    sample = Sample(id="a-0", tokens=[1])
    sample.append_response([5] * 60, log_probs=[-1.0] * 60)
    part = Completion(id="a-0", tokens=[5] * 70, log_probs=[], plain_log_probs=[], finish="abort", versions=[])
    group = Group(prompt=Prompt(id="main/0"), samples=[sample], rollouts={0: [0]})
    staleness.give_up(OpenGroup(group), [part])
    metrics = staleness.pop_metrics()
    assert (metrics["stale/dropped"], metrics["stale/dropped/len_128_256"]) == (1.0, 1.0)


def test_the_engine_goes_on_while_a_step_trains(ahead):
    """By events: requests end between `take` and `admit`, and tokens of one sample are of several versions."""
    ran = ahead(2, "wait", 3)
    assert sum(ran.events) > 0
    spans = [set(s.weight_versions) for groups in ran.steps for group in groups for s in group.samples]
    assert any(len(span) > 1 for span in spans)


def test_times_and_ages_are_told_in_runs_that_are_ahead_alone(ahead):
    names = {"async/engine_idle_seconds", "async/trainer_wait_seconds"}
    assert all(names <= metrics.keys() for metrics in ahead(1, "wait", 0, steps=3).metrics)
    assert all(not names & metrics.keys() for metrics in ahead(0, "wait", 0, steps=3).metrics)


@pytest.mark.parametrize("most", [1, 2])
def test_in_lockstep_group_n_is_made_wholly_by_the_version_that_its_number_says(most, ahead):
    ran = ahead(most, "wait", 0, schedule="lockstep", plugin=JUDGE.replace("< 0.15", "< 0"))
    for version, groups in enumerate(ran.steps):
        assert [group.prompt.position for group in groups] == [BATCH * version, BATCH * version + 1]
        for group in groups:
            made = {v for sample in group.samples for v in sample.weight_versions}
            assert made == {max(0, group.prompt.position // BATCH - most)}
    again = ahead(most, "wait", 9, schedule="lockstep")
    assert [[g.id for g in groups] for groups in again.steps] == [[g.id for g in groups] for groups in ran.steps]
