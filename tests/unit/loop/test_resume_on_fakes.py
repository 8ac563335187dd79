"""Runs that are cut off at any moment and go on: same weights, nothing lost, nothing twice.

Everything is real but the models: ledger, checkpoints, data order, collector, run directory.
"""

import asyncio
import json

import numpy as np
import pytest

from durability.cut_runs import CutRun
from slime_core.config.load import load_config
from slime_core.errors import Preempted
from slime_core.ledger.ledger import SqliteLedger
from slime_core.preemption import StopSignal

pytestmark = pytest.mark.unit

PLUGIN = '''
import dataclasses

import slime_core
from slime_core import Drop, Prompt, Reward

judged = []


class Rows:
    def __len__(self):
        return 40

    def at(self, position):
        return Prompt(id="", task="default", position=position, prompt=f"{position}+2=", label="3")

    def state(self):
        return {}


class Kept:
    """A plugin's own state: how often a step was told."""

    def __init__(self):
        self.steps = 0

    def state(self):
        return {"steps": self.steps}

    def load(self, state):
        self.steps = state["steps"]


kept = Kept()


@slime_core.hookimpl
def slime_state():
    return kept


@slime_core.hookimpl
def slime_step_done(report, ctx):
    kept.steps += 1


@slime_core.hookimpl
def slime_prompts(task, ctx):
    return Rows()


@slime_core.hookimpl
def slime_reward(group, ctx):
    judged.append(group.id)
    return [Reward(value=float(sum(s.response_tokens) % 5)) for s in group.samples]


@slime_core.hookimpl
def slime_filter(group, ctx):
    return Drop(reason="every_fifth") if group.prompt.position % 5 == 2 else None
'''

TURNS = """

@slime_core.hookimpl
async def slime_generate(group, ctx):
    for sample in group.samples:
        await ctx.generate(sample)
        sample.append_response([2, 3], mask=0, text="tool")
        await ctx.generate(sample)
    fan = group.samples[0]
    twin = dataclasses.replace(fan, tokens=list(fan.tokens), metadata={"twin": True})
    group.rollouts[fan.rollout_id].append(len(group.samples))
    group.samples.append(twin)
    return group
"""

FLAGS = [
    *("--plugin", "steady", "--num-rollout", "5", "--seed", "3", "--save-interval", "2", "--skip-eval-before-train"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "12"),
    *("--hf-checkpoint", ".", "--advantage-estimator", "grpo"),
]
KINDS = {
    "sync": [],
    "lockstep": ["--max-staleness", "1", "--no-colocate"],
    "two ahead": ["--max-staleness", "2", "--no-colocate"],
    "free": ["--max-staleness", "1", "--no-colocate", "--async-schedule", "free"],
    "surplus": ["--over-sampling-batch-size", "4"],
    "partial": ["--over-sampling-batch-size", "4", "--partial-rollout", "--use-tis"],
}
SAME = ["sync", "lockstep", "two ahead", "surplus", "partial"]


class Run(CutRun):
    """A run of these flags."""

    def __init__(self, path, flags):
        super().__init__(path, load_config(None, [*FLAGS, *flags]))

    def finished(self):
        """What of a finished run must not depend on how often it was cut."""
        lines = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return self.final(), [(line["version"], line["metrics"]["loss"]) for line in lines if line["kind"] == "step"]

    def audit(self):
        """Counts of the ledger, and each step's samples."""

        async def look():
            ledger = SqliteLedger(self.path)
            counts = dict(await ledger.counts())
            steps = [await ledger.composition(version) for version in range(1, 6)]
            await ledger.close()
            return counts, steps

        return asyncio.run(look())


@pytest.fixture
def run(tmp_path, install_plugin):
    """``run(name, kind, turns=False)``: a run of the plugin."""
    installed = []

    def make(name, kind, *more, turns=False):
        if not installed:
            install_plugin("steady", PLUGIN + (TURNS if turns else ""))
            installed.append(1)
        return Run(tmp_path / name, [*KINDS[kind], *more])

    return make


@pytest.mark.parametrize(
    ("turns", "cuts"), [(False, (3, 20, 55)), (True, (11, 37, 90))], ids=["one turn", "two turns"]
)
@pytest.mark.parametrize(
    "kind", ["sync", "partial", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in SAME[1:-1])]
)
def test_a_run_that_is_cut_and_goes_on_ends_in_the_same_weights(kind, turns, cuts, run):
    whole = run("whole", kind, turns=turns)
    assert whole.start() == 5
    for cut in cuts:
        pieces = run(f"cut-{cut}", kind)
        starts = 0
        while pieces.start(cut=cut * 1.3**starts) is None:
            starts += 1
            assert starts < 40
        assert pieces.finished() == whole.finished(), (cut, starts)
        counts, steps = pieces.audit()
        assert counts["pending"] == 0
        assert steps == whole.audit()[1]
        assert len({name for step in steps for name in step}) == counts["trained"]


def test_a_free_run_makes_recorded_steps_again_and_loses_nothing(run):
    pieces, seen, starts = run("free", "free"), {}, 0
    while pieces.start(cut=4 * 1.3**starts) is None:
        starts += 1
        for version, ids in enumerate(pieces.audit()[1], start=1):
            assert seen.setdefault(version, ids or None) in (ids, None)
            seen[version] = ids or None
    counts, steps = pieces.audit()
    assert starts > 2
    assert counts["pending"] == 0
    assert len({name for step in steps for name in step}) == counts["trained"] == 20


def test_finished_groups_are_not_judged_again(run, monkeypatch):
    import sys

    pieces = run("once", "sync")
    starts = 0
    while pieces.start(cut=4 * 1.3**starts) is None:
        starts += 1
    judged = sys.modules["steady_plugin_module"].judged
    assert starts > 1
    counts, _ = pieces.audit()
    # a group whose reward came in the moment of the cut is judged once more, no other
    assert len(judged) - len(set(judged)) <= 2 * starts
    assert counts["trained"] == 20


def test_plugins_get_their_state_back(run):
    import sys

    pieces, starts = run("state", "sync"), 0
    while pieces.start(cut=4 * 1.3**starts) is None:
        sys.modules["steady_plugin_module"].kept.steps = 0  # as in a new process
        starts += 1
    assert starts
    assert sys.modules["steady_plugin_module"].kept.steps == 5


def test_a_run_that_is_asked_to_stop_checkpoints_where_it_is(run):
    pieces = run("stopped", "sync")
    stop = StopSignal()
    stop.request("SIGTERM")
    with pytest.raises(Preempted, match="SIGTERM"):
        pieces.start(stop=stop)
    assert [path.name for path in (pieces.path / "checkpoints").iterdir()] == ["step-0"]
    assert pieces.start() == 5
    whole = run("whole", "sync")
    whole.start()
    assert pieces.finished() == whole.finished()
    np.testing.assert_equal(pieces.trainer.weights, whole.trainer.weights)


def test_a_stop_while_groups_of_older_weights_are_in_flight_writes_no_checkpoint(run):
    """A checkpoint of version 1 would keep groups that version 0 had begun; the resumed run makes the step again."""
    pieces = run("stopped", "lockstep")
    stop = StopSignal()

    def prepare(plugins, report):
        report.phase = lambda name: stop.request("SIGTERM") if name == "train" else None

    pieces.prepare = prepare
    with pytest.raises(Preempted, match="stopped at version 1"):
        pieces.start(stop=stop)
    assert list((pieces.path / "checkpoints").iterdir()) == []
    pieces.prepare = lambda plugins, report: None
    assert pieces.start() == 5
    whole = run("whole", "lockstep")
    whole.start()
    assert pieces.finished() == whole.finished()
