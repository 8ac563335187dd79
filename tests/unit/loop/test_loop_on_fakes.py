"""The whole loop to its end on fakes: transfers that need both sides, two ranks, critic and teacher, fan-out, references.

No torch and no model runs here; what is proven is the order of things and that no sample is lost.
"""

import asyncio
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import pytest
from one_device import Device, lent

from durability.fake_trainer import FakeTrainer, RankedTrainer
from durability.memory_ledger import MemoryLedger
from slime_core import loop
from slime_core.clusters.colocation import DedicatedDevices, MemorySwapping, TimeSharing
from slime_core.config.load import load_config
from slime_core.errors import EngineError, PluginError
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine

pytestmark = pytest.mark.unit

PLUGIN = '''
import dataclasses

import numpy as np

import slime_core
from slime_core import Drop, Estimator, Prompt, Reward, Status
from slime_core.types import ArrayRef

seen = []


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
async def slime_generate(group, ctx):
    """Two turns, a tool's answer between them, and the second rollout fans out into two samples."""
    for sample in group.samples:
        await ctx.generate(sample)
        sample.append_response([2, 3], mask=0, text="tool")
        await ctx.generate(sample)
        sample.rollout_routed_experts = ArrayRef(segment="a.seg", offset=0, dtype="int16", shape=(2,), crc32=0)
    fan = group.samples[1]
    twin = dataclasses.replace(fan, tokens=list(fan.tokens), metadata={"twin": True})
    group.rollouts[fan.rollout_id].append(len(group.samples))
    group.samples.append(twin)
    return group


@slime_core.hookimpl
def slime_reward(group, ctx):
    kinds = {0: "score", 1: "failed", 2: "score"}
    return [Reward(value=float(i), kind=kinds.get(i, "score"), terms={"length": 1.0}) for i in range(len(group.samples))]


@slime_core.hookimpl
def slime_filter(group, ctx):
    seen.append(group.prompt.position)
    return Drop(reason="every_third") if group.prompt.position % 3 == 2 else None


def with_critic(batch, train):
    gap = batch.columns["teacher"] - batch.columns["values"]
    return {"advantages": (batch.reward[batch.sample_of_token()] + gap).astype(np.float32)}


@slime_core.hookimpl
def slime_advantage():
    return [Estimator(name="with_critic", fn=with_critic, needs=frozenset({"values", "teacher"}))]
'''

FLAGS = [
    *("--plugin", "fakes", "--advantage-estimator", "with_critic", "--num-rollout", "4", "--seed", "3"),
    *("--rollout-batch-size", "3", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "5"),
    *("--hf-checkpoint", ".", "--skip-eval-before-train"),
]


def _run(tmp_path, trainer, *, engine=None, devices=TimeSharing, flags=(), ledger=None, recipe=None):
    config = load_config(recipe, [*FLAGS, *flags])
    plugins = load_plugins(config)
    engine, ledger = engine or FakeEngine(), ledger or MemoryLedger()
    if isinstance(devices, type):
        devices = devices(*{DedicatedDevices: (), TimeSharing: (engine,), MemorySwapping: (engine, trainer)}[devices])
    components = RunComponents(
        engines=engine, tokenizer=CharTokenizer(), vocab_size=16, trainer=trainer, ledger=ledger, devices=devices
    )

    @asynccontextmanager
    async def fakes(config, plugins, report):
        yield components

    with RunDir.create("fakes", at=tmp_path / "run") as run_dir:
        report = Report(run_dir, config)
        report.start()
        try:
            work = loop.run(config, plugins, report, cluster=fakes)
            version = asyncio.run(asyncio.wait_for(work, 30))
        finally:
            report.finish()
    return version, ledger


@pytest.mark.parametrize(
    "make",
    [FakeTrainer, lambda: FakeTrainer(rendezvous=True), lambda: RankedTrainer(2)],
    ids=["plain", "rendezvous", "two ranks"],
)
def test_the_loop_ends_and_every_sample_is_trained_or_dropped(make, tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)
    trainer = make()
    version, ledger = _run(tmp_path, trainer)
    assert version == 4
    counts = asyncio.run(ledger.counts())
    # 12 groups of 3 samples train; positions 2, 5, 8, 11, 14, 17 are dropped until 12 of 18 groups are kept
    assert counts["trained"] == 36
    assert counts["pending"] == 0
    assert counts["dropped/every_third"] == counts["issued"] - 36 > 0
    assert [len(ids) for ids in trainer.batches] == [9, 9, 9, 9]
    assert trainer.batches[0] == [f"main/{p}-{j}" for p in (0, 1, 3) for j in ("0", "1", "1.1")]


ENDED = """

@slime_core.hookimpl
async def slime_run_done(ctx):
    (ctx.run_dir / "ended").touch(exist_ok=False)
"""


@pytest.mark.parametrize("fails", [False, True], ids=["well", "in an error"])
def test_plugins_are_told_once_when_a_run_is_over_however_it_ended(fails, tmp_path, install_plugin):
    source = PLUGIN.replace("return group\n", "raise RuntimeError\n") if fails else PLUGIN
    install_plugin("fakes", source + ENDED)
    with pytest.raises(PluginError) if fails else nullcontext():
        _run(tmp_path, FakeTrainer())
    assert (tmp_path / "run" / "ended").exists()


def test_ranks_do_not_change_the_weights(tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)
    one, two = FakeTrainer(), RankedTrainer(2)
    _run(tmp_path / "one", one)
    _run(tmp_path / "two", two)
    np.testing.assert_allclose(one.weights["head"], two.weights["head"])
    assert (one.weights["head"] != 0).any()


def test_engine_and_trainer_swap_memory_without_using_what_was_given_away(tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)
    version, _ = _run(tmp_path, FakeTrainer(), devices=MemorySwapping)
    assert version == 4


def test_a_later_stage_begins_with_the_memory_of_the_engine(tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)
    (tmp_path / "recipe.toml").write_text('[[stage]]\nname = "one"\nnum_rollout = 2\n[[stage]]\nname = "two"\n')
    device = Device()
    engine, trainer, devices = asyncio.run(lent(device))
    version, _ = _run(tmp_path, trainer, engine=engine, devices=devices, recipe=tmp_path / "recipe.toml")
    assert (version, len(trainer.stages)) == (6, 2)


@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_the_collector_runs_ahead_by_no_more_than_the_bound(schedule, tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)
    trainer = FakeTrainer()
    flags = ["--no-colocate", "--max-staleness", "1", "--async-schedule", schedule]
    version, ledger = _run(tmp_path, trainer, devices=DedicatedDevices, flags=flags)
    assert version == 4
    for step, ids in enumerate(trainer.batches):
        versions = {v for name in ids for v in ledger.rows[name].sample.weight_versions if v >= 0}
        assert min(versions) >= step - 1
        if schedule == "lockstep":
            assert versions == {max(0, step - 1)}


def test_a_stale_engine_stops_the_run(tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN)

    class Stale(FakeEngine):
        async def load(self, update):
            await super().load(update)
            self.tensors["head"] = self.tensors["head"] + 1.0

    with pytest.raises(EngineError, match="differ from the trainer's"):
        _run(tmp_path, FakeTrainer(), engine=Stale())


def test_a_broken_reward_names_plugin_hook_and_prompt_and_loses_nothing(tmp_path, install_plugin):
    install_plugin("fakes", PLUGIN.replace("kinds = {0:", "kinds = 1 / 0, {0:"))
    ledger = MemoryLedger()
    with pytest.raises(PluginError, match="fakes") as caught:
        _run(tmp_path, FakeTrainer(), ledger=ledger)
    assert "slime_reward" in str(caught.value)
    assert "main/" in str(caught.value)
    counts = asyncio.run(ledger.counts())
    assert counts["issued"] == counts["pending"] > 0


def test_a_broken_reward_may_drop_its_group(tmp_path, install_plugin):
    source = PLUGIN.replace(
        "    kinds = {0:", "    if group.prompt.position == 1:\n        raise ValueError('no')\n    kinds = {0:"
    )
    install_plugin("fakes", source)
    _, ledger = _run(tmp_path, FakeTrainer(), flags=["--on-plugin-error", "drop"])
    counts = asyncio.run(ledger.counts())
    assert counts["dropped/plugin_error"] == 3  # two rollouts, one of them with a sibling
    assert counts["pending"] == 0
