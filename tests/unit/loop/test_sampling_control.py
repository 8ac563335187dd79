"""The whole loop with over-sampling, partial rollout and dynamic sampling: nothing is lost, and runs repeat."""

import asyncio
import json
from contextlib import asynccontextmanager
from zlib import crc32

import numpy as np
import pytest

from durability.fake_trainer import FakeTrainer
from slime_core import loop
from slime_core.clusters.colocation import DedicatedDevices, MemorySwapping, TimeSharing
from slime_core.config.load import load_config
from slime_core.errors import TrainerError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine

pytestmark = pytest.mark.unit

PLUGIN = '''
import slime_core
from slime_core import Prompt, Reward


class Rows:
    def __len__(self):
        return 50

    def at(self, position):
        return Prompt(id="", task="default", position=position, prompt="1+2=", label="3")

    def state(self):
        return {}


@slime_core.hookimpl
def slime_prompts(task, ctx):
    return Rows()


@slime_core.hookimpl
def slime_reward(group, ctx):
    """Every fifth prompt is too hard."""
    hard = group.prompt.position % 5 == 4
    even = [float(not hard and sum(s.response_tokens) % 2) for s in group.samples]
    return [Reward(value=v, terms={"even": v, "short": 0.0 if hard else 1.0 / (1 + s.response_length)}) for v, s in zip(even, group.samples)]
'''

FLAGS = [
    *("--plugin", "control", "--hf-checkpoint", ".", "--skip-eval-before-train", "--seed", "3"),
    *("--num-rollout", "5", "--rollout-batch-size", "3", "--n-samples-per-prompt", "2"),
    *("--rollout-max-response-len", "24", "--over-sampling-batch-size", "7", "--dynamic-sampling", "equal_rewards"),
    *("--reward-weights", "{ even = 1.0, short = 0.1 }", "--overlong-buffer-len", "8"),
]
PARTIAL = ("--partial-rollout", "--mask-offpolicy-in-partial-rollout")


class Late(FakeEngine):
    """Serves requests late, each by its own number of turns."""

    def __init__(self, salt):
        super().__init__()
        self.salt = salt

    async def generate(self, request):
        for _ in range(crc32(f"{request.id}{self.salt}".encode()) % 50):
            await asyncio.sleep(0)
        return await super().generate(request)


class Run:
    """One run of the loop on fakes, with the ledger that runs really have."""

    def __init__(self, tmp_path, flags, *, engine=None, devices=TimeSharing, recipe=None):
        config = load_config(recipe, [*FLAGS, *flags])
        plugins = load_plugins(config)
        self.engine, self.trainer, self.path = engine or FakeEngine(), FakeTrainer(), tmp_path
        holder = {DedicatedDevices: (), TimeSharing: (self.engine,), MemorySwapping: (self.engine, self.trainer)}[
            devices
        ]

        @asynccontextmanager
        async def fakes(config, plugins, report):
            ledger = SqliteLedger(report.run_dir.path)
            try:
                yield RunComponents(
                    engines=self.engine,
                    tokenizer=CharTokenizer(),
                    vocab_size=16,
                    trainer=self.trainer,
                    ledger=ledger,
                    devices=devices(*holder),
                )
                self.counts = dict(await ledger.counts())
                self.samples = [await ledger.samples(ids) for ids in self.trainer.batches]
            finally:
                await ledger.close()

        with RunDir.create("control", at=tmp_path) as run_dir:
            report = Report(run_dir, config)
            report.start()
            try:
                self.version = asyncio.run(asyncio.wait_for(loop.run(config, plugins, report, cluster=fakes), 30))
            finally:
                report.finish()

    @property
    def metrics(self):
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [row["metrics"] for row in rows if row["kind"] == "step"]

    def payload(self):
        return [[sample.to_dict() for sample in step] for step in self.samples]


@pytest.mark.parametrize(
    ("partial", "schedule", "devices"),
    [
        ((), "lockstep", TimeSharing),
        ((), "free", DedicatedDevices),
        (PARTIAL, "lockstep", MemorySwapping),
        (PARTIAL, "free", TimeSharing),
        (PARTIAL, "free", MemorySwapping),
    ],
)
def test_every_sample_is_trained_or_dropped(partial, schedule, devices, tmp_path, install_plugin):
    install_plugin("control", PLUGIN)
    run = Run(tmp_path / "run", (*partial, "--async-schedule", schedule), devices=devices, engine=Late("a"))
    assert run.version == 5
    dropped = {name: count for name, count in run.counts.items() if name.startswith("dropped/")}
    assert run.counts["trained"] == 5 * 3 * 2
    assert run.counts["pending"] == 0
    assert run.counts["issued"] == 30 + sum(dropped.values())
    assert dropped["dropped/over_sampled"] > 0
    assert dropped["dropped/equal_rewards"] > 0
    told = {f"dropped/{name[8:]}": sum(m.get(name, 0) for m in run.metrics) for name in dropped}
    assert told == dropped, "every drop of the ledger is in the metrics"
    for step in run.samples:
        for start in range(0, len(step), 2):
            assert step[start].group_index == step[start + 1].group_index
            assert step[start].group_index % 5 != 4


@pytest.mark.parametrize("partial", [(), PARTIAL], ids=["dropped", "partial"])
def test_lockstep_repeats_bit_for_bit_however_fast_the_engine_is(partial, tmp_path, install_plugin):
    install_plugin("control", PLUGIN)
    one = Run(tmp_path / "one", partial)
    other = Run(tmp_path / "two", partial, engine=Late("b"))
    assert other.payload() == one.payload()
    assert other.metrics == one.metrics
    assert (other.trainer.weights["head"] == one.trainer.weights["head"]).all()
    assert np.abs(one.trainer.weights["head"]).sum() > 0


def test_continued_samples_are_stale_and_their_old_tokens_masked(tmp_path, install_plugin):
    install_plugin("control", PLUGIN)
    run = Run(tmp_path / "run", PARTIAL)
    for version, (step, metrics) in enumerate(zip(run.samples, run.metrics)):
        lowest = {}
        for sample in step:
            low = min(sample.weight_versions)
            lowest[sample.group_index] = min(low, lowest.get(sample.group_index, low))
            newest = max(sample.weight_versions)
            assert newest <= version
            assert sample.loss_mask == [int(v == newest) for v in sample.weight_versions]
        assert metrics["staleness/max"] == version - min(lowest.values())
    assert max(m["staleness/max"] for m in run.metrics) >= 1
    assert sum(m["rollout/continued_samples"] for m in run.metrics) > 0


def test_stages_leave_nothing_behind(tmp_path, install_plugin):
    install_plugin("control", PLUGIN)
    recipe = tmp_path / "two.toml"
    recipe.write_text('[[stage]]\nname = "a"\nnum_rollout = 2\n[[stage]]\nname = "b"\nnum_rollout = 5\n')
    run = Run(tmp_path / "run", PARTIAL, recipe=recipe)
    assert run.version == 7
    assert run.counts["pending"] == 0
    stages = [{sample.id.split("/")[0] for sample in step} for step in run.samples]
    assert stages == [{"a"}] * 2 + [{"b"}] * 5


def test_hopeless_data_ends_the_run_with_its_rewards(tmp_path, install_plugin):
    install_plugin("control", PLUGIN.replace("% 5 == 4", "> 5"))
    with pytest.raises(TrainerError) as caught:
        Run(tmp_path / "run", ("--max-dropped-groups", "10"))
    assert caught.value.code == "TRN100"
    assert "rewards seen" in caught.value.why
