"""Evaluation that does not stop training: the figures of one in place, once a version, however the run is cut.

Engines draw tokens by their weights' version here, so one token of other weights would change a figure.
"""

import asyncio
import json
import sys

import pytest

from durability.cut_runs import CutRun
from slime_core.clusters.engine_set import EngineSet
from slime_core.config.load import load_config
from slime_core.errors import ConfigError, EngineError, Preempted
from slime_core.evaluate import Evaluations
from slime_core.preemption import StopSignal
from slime_core.seeds import seed_of
from slime_core.testing.fakes import FakeEngine

pytestmark = pytest.mark.unit

PLUGIN = """
import asyncio

import slime_core
from slime_core import Prompt, Reward

told = []  # what happened, in order
until = {}  # version -> event that its evaluation waits for
marks = {}  # word -> event that it sets


def tell(word):
    told.append(word)
    if word in marks:
        marks[word].set()


class Rows:
    def __len__(self):
        return 40

    def at(self, position):
        return Prompt(id="", task="default", position=position, prompt=f"{position % 7}+2=", label="3")

    def state(self):
        return {}


@slime_core.hookimpl
def slime_prompts(task, ctx):
    return Rows()


@slime_core.hookimpl
async def slime_reward(group, ctx):
    if ctx.evaluation:
        told.append(("made by", ctx.version, {v for s in group.samples for v in s.weight_versions}))
        if ctx.version in until:
            await until[ctx.version].wait()
        if group.id.endswith("39"):
            tell(f"evaluated {ctx.version}")
    return [Reward(value=float(sum(s.response_tokens) % 5)) for s in group.samples]


@slime_core.hookimpl
def slime_step_done(report, ctx):
    tell(f"step {report.version}")
"""

FLAGS = [
    *("--plugin", "watched", "--num-rollout", "6", "--seed", "3", "--save-interval", "2", "--eval-interval", "3"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "12"),
    *("--hf-checkpoint", ".", "--advantage-estimator", "grpo", "--eval-temperature", "1", "--no-colocate"),
    *("--n-samples-per-eval-prompt", "2"),
    *("--max-staleness", "1", "--rollout-num-engines", "2"),
]
RECIPE = '[[eval.eval_tasks]]\nname = "held"\n'
FREE, ON_POLICY = ("--async-schedule", "free"), ("--max-staleness", "0")


class Weighed(FakeEngine):
    """Its draws are a function of its weights too."""

    def _draw(self, request, out):
        super()._draw(request, out)
        out.tokens[-1] = seed_of(request.seed, len(request.tokens) + len(out.tokens), self.version) % self.vocab_size


class Run(CutRun):
    """A run with an evaluation set, on ``engines`` engines of a ``kind``."""

    def __init__(self, path, *flags, engines=2, kind=Weighed):
        path.mkdir(exist_ok=True)
        (path / "recipe.toml").write_text(RECIPE)
        config = load_config(path / "recipe.toml", [*FLAGS, *flags])
        super().__init__(
            path / "run", config, engine=lambda epoch: EngineSet([kind(epoch=epoch) for _ in range(engines)])
        )

    def start(self, *, beside=None, **more):
        """As ever; ``beside`` is called on the same loop before it."""
        self.beside = beside
        return super().start(**more)

    def prepare(self, plugins, report):
        self.module = sys.modules["watched_plugin_module"]
        for state in (self.module.told, self.module.until, self.module.marks):
            state.clear()
        if self.beside:
            self.beside(self.module)
        phase = report.phase
        report.phase = lambda name: (phase(name), self.module.tell(f"phase {name}"))

    def rows(self, kind):
        lines = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        return [row for row in lines if row["kind"] == kind]

    def evaluations(self):
        """Version and figures of each, by version."""
        rows = sorted(self.rows("eval"), key=lambda row: row["version"])
        return [(row["version"], row["name"], row["metrics"]) for row in rows]

    def records(self):
        """What is kept of every question, by file."""
        return {path.name: path.read_text() for path in (self.path / "evaluations").iterdir()}

    def seen(self):
        """The versions whose tokens an evaluation saw."""
        return {word[1:2] + tuple(sorted(word[2])) for word in self.module.told if word[0] == "made by"}


@pytest.fixture
def run(tmp_path, install_plugin):
    install_plugin("watched", PLUGIN)
    return lambda name, *flags, **more: Run(tmp_path / name, *flags, **more)


@pytest.mark.parametrize("schedule", [(), FREE, ON_POLICY], ids=["lockstep", "free", "on-policy"])
def test_an_evaluation_beside_training_has_the_figures_of_one_in_place_while_steps_go_on(run, schedule):
    """The evaluation of version 0 ends only after step 2, and that of 3 after step 5: in place they never would."""
    schedule = ("--save-interval", "3", *schedule)
    place, beside = run("place", *schedule), run("beside", "--eval-async", *schedule)
    assert place.start() == 6

    def hold(module):
        for version in (0, 3):
            module.until[version] = module.marks[f"step {version + 2}"] = asyncio.Event()

    assert beside.start(beside=hold) == 6
    assert [version for version, _, _ in beside.evaluations()] == [0, 3, 6]
    assert beside.evaluations() == place.evaluations()
    assert all({"pass@1", "pass@2/low", "pass@2/high"} <= set(metrics) for _, _, metrics in beside.evaluations())
    assert beside.records() == place.records()
    assert sorted(beside.records()) == [f"held-{version:06d}.json" for version in (0, 3, 6)]
    assert len({json.dumps(metrics) for _, _, metrics in beside.evaluations()}) == 3
    words = beside.module.told
    assert words.index("step 2") < words.index("evaluated 0") < words.index("evaluated 3") < words.index("evaluated 6")
    assert words.index("step 5") < words.index("evaluated 3")
    assert beside.seen() == {(0, 0), (3, 3), (6, 6)}


def test_a_run_trains_the_same_with_and_without_it(run):
    place, beside = run("place"), run("beside", "--eval-async")
    assert (place.start(), beside.start()) == (6, 6)

    def trained(one):
        return [{k: v for k, v in row["metrics"].items() if "seconds" not in k and "ledger" not in k} for row in one]

    assert trained(beside.rows("step")) == trained(place.rows("step"))
    assert (place.trainer.weights["head"] == beside.trainer.weights["head"]).all()


def test_a_due_evaluation_and_its_engines_weights_wait_for_the_evaluation_before(run):
    one = run("each", "--eval-async", "--eval-interval", "1")

    class Oldest:
        """Lets the evaluation end that the loop says that it waits for."""

        def __init__(self, events):
            self._events = iter(events)

        def set(self):
            next(self._events).set()

    def hold(module):
        module.until |= {version: asyncio.Event() for version in range(6)}
        module.marks["phase evaluate"] = Oldest(module.until.values())

    assert one.start(beside=hold) == 6
    assert [version for version, _, _ in one.evaluations()] == list(range(7))
    assert one.seen() == {(version, version) for version in range(7)}
    words = [word for word in one.module.told if isinstance(word, str)]
    assert all(words.index(f"evaluated {v}") < words.index(f"step {v + 1}") for v in range(6))
    assert all("evaluate" in row["seconds"] for row in one.rows("step"))


@pytest.mark.parametrize(
    "cuts", [(13, 41), *(pytest.param(cuts, marks=pytest.mark.nightly) for cuts in ((5, 24), (29, 77)))]
)
def test_a_run_that_is_cut_and_goes_on_has_every_evaluation_once_with_the_same_figures(run, cuts):
    whole = run("whole", "--eval-async")
    assert whole.start() == 6
    for cut in cuts:
        pieces = run(f"cut-{cut}", "--eval-async")
        starts = 0
        while pieces.start(cut=cut * 1.3**starts) is None:
            starts += 1
            assert starts < 40
        assert pieces.evaluations() == whole.evaluations(), (cut, starts)
        assert pieces.records() == whole.records(), (cut, starts)


def test_a_stop_at_the_version_that_is_evaluated_leaves_it_to_the_run_that_goes_on(run):
    one, stop = run("stopped", "--eval-async"), StopSignal()

    def hold(module):
        module.until[0] = asyncio.Event()  # for ever
        stop.request("SIGTERM")

    with pytest.raises(Preempted, match="SIGTERM"):
        one.start(stop=stop, beside=hold)
    assert one.evaluations() == []
    assert one.start() == 6
    whole = run("whole", "--eval-async")
    whole.start()
    assert one.evaluations() == whole.evaluations()


def test_a_stop_after_it_waits_for_an_evaluation_of_earlier_weights(run):
    """No checkpoint has version 0's weights any more, so its evaluation ends before there is one of version 1."""
    one, stop = run("stopped", "--eval-async"), StopSignal()

    class Asked:
        """The run is asked to stop after its first step, with the evaluation going on for a while."""

        def set(self):
            stop.request("SIGTERM")
            asyncio.get_running_loop().call_later(0.05, one.module.until[0].set)

    def hold(module):
        module.until[0], module.marks["step 1"] = asyncio.Event(), Asked()

    with pytest.raises(Preempted, match="version 1"):
        one.start(stop=stop, beside=hold)
    assert [version for version, _, _ in one.evaluations()] == [0]
    assert [path.name for path in (one.path / "checkpoints").iterdir()] == ["step-1"]
    assert one.start() == 6
    assert "evaluated 0" not in one.module.told
    assert [version for version, _, _ in one.evaluations()] == [0, 3, 6]


def test_an_error_of_the_evaluation_ends_the_run(run):
    class Breaks(Weighed):
        async def generate(self, request):
            if request.id.startswith("eval/"):
                raise EngineError("it fell", code="ENG84")
            return await super().generate(request)

    one = run("broken", "--eval-async", kind=Breaks)
    with pytest.raises(EngineError, match="it fell"):
        one.start()
    assert len(one.trainer.batches) < 6


def test_a_wait_for_samples_ends_at_once_when_an_evaluation_fails(run):
    """Training samples of the third step are never judged, so nothing else would end that wait."""

    class Breaks(Weighed):
        async def generate(self, request):
            if request.id.startswith("eval/"):
                await one.module.until["failing"].wait()
                raise EngineError("it fell", code="ENG84")
            if request.id.startswith("main/4-"):
                one.module.tell("waiting")
                await asyncio.Event().wait()
            return await super().generate(request)

    one = run("broken", "--eval-async", "--save-interval", "0", kind=Breaks)

    def hold(module):
        module.until["failing"] = module.marks["phase rollout"] = Third()

    class Third(asyncio.Event):
        """Set when the third step waits for its samples."""

        def set(self):
            if len(one.trainer.batches) == 2 and "waiting" in one.module.told:
                asyncio.get_running_loop().call_later(0.05, super().set)

    with pytest.raises(EngineError, match="it fell"):
        one.start(beside=hold)
    assert len(one.trainer.batches) == 2


KEEPER = """

kept = []


@slime_core.hookimpl
async def slime_generate(group, ctx):
    \"\"\"Asks the engine that it met first.\"\"\"
    kept[:] = kept or [ctx.engine]
    if ctx.evaluation and ctx.version in until:
        await until[ctx.version].wait()
    for sample in group.samples:
        await dataclasses.replace(ctx, engine=kept[0]).generate(sample)
    return group
"""


def test_tokens_of_other_weights_end_the_run_instead_of_becoming_a_figure(tmp_path, install_plugin):
    install_plugin("watched", "import dataclasses\n" + PLUGIN + KEEPER)
    one = Run(tmp_path / "mixed", "--eval-async", "--save-interval", "3", "--skip-eval-before-train")

    def hold(module):
        module.kept.clear()
        module.until[3] = module.marks["step 5"] = asyncio.Event()

    with pytest.raises(EngineError, match="evaluation of version 3 got tokens of version") as caught:
        one.start(beside=hold)
    assert caught.value.code == "ENG83"
    assert caught.value.where.startswith("eval/held/")
    assert one.evaluations() == []


def test_a_single_engine_is_refused_before_training(run):
    one = run("one", "--eval-async", engines=1)
    with pytest.raises(ConfigError, match="none can be reserved") as caught:
        one.start()
    assert caught.value.code == "CFG04"
    assert "--rollout-num-engines 2" in caught.value.fix
    assert one.trainer.batches == []


def test_groups_taken_in_the_moment_of_a_stop_are_not_lost():
    """The collector has handed its groups over when the signal comes: they train, else a resumed run skips them."""

    async def run():
        stop = StopSignal()

        async def take():
            stop.request("SIGTERM")
            return ["groups"]

        return await stop.or_stop(take(), Evaluations(None, None))

    assert asyncio.run(run()) == ["groups"]
