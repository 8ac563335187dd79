"""The ledger on disk against its rules in memory: the same calls, the same answers, and nothing wrong in any row."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from durability.memory_ledger import MemoryLedger
from slime_core.errors import SlimeError
from slime_core.ledger.ledger import SqliteLedger, conservation
from slime_core.testing.contracts import sample_group
from slime_core.trainers.batch import make_batch
from slime_core.types import Drop, Group

pytestmark = pytest.mark.unit

POSITIONS = st.integers(0, 5)
REASONS = st.sampled_from(["equal_rewards", "over_sampled", "infra_error"])


def fast_folder():
    """A folder in memory, where syncs cost nothing."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))


class Twins(RuleBasedStateMachine):
    """Every rule calls both ledgers."""

    @initialize()
    def begin(self):
        self.folder = fast_folder()
        self.runner = asyncio.Runner()
        self.disk, self.model = SqliteLedger(self.folder), MemoryLedger()
        self.attempts = {}
        self.version = 0

    def teardown(self):
        if hasattr(self, "disk"):
            assert self.run(audit(self.disk)) == []
            self.run(self.disk.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def run(self, call):
        return self.runner.run(call)

    def both(self, act):
        """The same call on both; both answer the same, or both refuse."""
        answers = []
        for ledger in (self.disk, self.model):
            try:
                answers.append(self.run(act(ledger)))
            except SlimeError:
                answers.append("refused")
        assert answers[0] == answers[1]
        return answers[0]

    def group(self, position, *, fan_out=False, newest=0):
        group = sample_group(position, fan_out=fan_out)
        for sample in group.samples:
            sample.attempt = self.attempts.get(position, 0)
            sample.weight_versions = [0, newest, -1]
        return group

    @rule(position=POSITIONS)
    def issue(self, position):
        self.both(lambda ledger: ledger.issue([self.group(position)]))

    @rule(position=POSITIONS)
    def issue_another_attempt(self, position):
        self.attempts[position] = self.attempts.get(position, 0) + 1
        if self.both(lambda ledger: ledger.issue([self.group(position)])) == "refused":
            self.attempts[position] -= 1

    @rule(position=POSITIONS, fan_out=st.booleans(), unfit=st.integers(0, 2), newest=st.integers(0, 4), reason=REASONS)
    def finish(self, position, fan_out, unfit, newest, reason):
        group = self.group(position, fan_out=fan_out, newest=newest)
        drops = [(group.samples[:unfit], Drop(reason=reason))]
        kept = Group(prompt=group.prompt, samples=group.samples[unfit:], rollouts={})
        self.both(lambda ledger: ledger.finish(kept, drops))

    @rule(position=POSITIONS, part=st.slices(3), newest=st.integers(0, 4), reason=REASONS)
    def drop(self, position, part, newest, reason):
        samples = self.group(position, fan_out=True, newest=newest).samples[part]
        self.both(lambda ledger: ledger.drop([(samples, Drop(reason=reason))]))

    @rule(position=POSITIONS, newest=st.integers(1, 5))
    def suspend(self, position, newest):
        turns = {}
        for sample in self.group(position).samples:
            turns[sample.id] = suspended_turns(sample.id)
            turns[sample.id][1].pieces[1].versions = [3, newest]
        self.both(lambda ledger: ledger.suspend(turns))

    @rule(positions=st.lists(POSITIONS, min_size=1, max_size=2, unique=True), ahead=st.integers(0, 1))
    def journal(self, positions, ahead):
        known = self.run(self.model.groups([f"main/{p}" for p in positions]))
        groups = [
            Group(prompt=sample_group(p).prompt, samples=known[f"main/{p}"].samples, rollouts={})
            for p in positions
            if f"main/{p}" in known and known[f"main/{p}"].samples
        ]
        if groups:
            self.both(lambda ledger: ledger.journal(make_batch(self.version + ahead, "main", groups)))

    @rule(other=st.booleans())
    def train(self, other):
        fingerprint = "other" if other else f"f{self.version + 1}"
        if self.both(lambda ledger: ledger.trained(self.version + 1, fingerprint)) is None:
            self.version += 1

    @rule(back=st.integers(0, 3))
    def rewind(self, back):
        version = max(self.version - back, 0)
        if self.both(lambda ledger: ledger.rewind(version)) is None:
            self.version = version

    @rule(back=st.integers(0, 3))
    def prune(self, back):
        self.both(lambda ledger: ledger.prune(max(self.version - back, 0)))

    @rule()
    def open_again(self):
        self.run(self.disk.close())
        self.disk = SqliteLedger(self.folder)

    @invariant()
    def they_agree(self):
        if not hasattr(self, "disk"):
            return
        prompts = [f"main/{position}" for position in range(6)]
        ids = [f"{prompt}-{rollout}" for prompt in prompts for rollout in range(2)]

        async def look(ledger):
            counts = dict(await ledger.counts())
            conservation(counts)
            stored = [name for name in ids[:4] if await readable(ledger, name)]
            turns, step = await ledger.suspended(ids, before=4), await ledger.composition(self.version + 1)
            return counts, await ledger.groups(prompts), turns, step, await ledger.samples(stored)

        assert self.both(look) != "refused"


async def readable(ledger, name):
    try:
        return bool(await ledger.samples([name]))
    except SlimeError:
        return False


Twins.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_it_does_what_its_rules_say = Twins.TestCase


class ManyTwins(Twins):
    """The same for longer."""


ManyTwins.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_it_does_what_its_rules_say_for_longer = pytest.mark.nightly(ManyTwins.TestCase)
