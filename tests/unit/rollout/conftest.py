"""A collector on a fake engine: prompts without end, a plugin that judges, steps as the loop makes them."""

import asyncio
import dataclasses

import pytest

from durability.memory_ledger import MemoryLedger
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.plugins import load_plugins
from slime_core.rollout.collector import Collector
from slime_core.rollout.groups import Source, training_params
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Prompt, WeightUpdate

VOCAB = 16
FLAGS = [
    *("--hf-checkpoint", ".", "--plugin", "judge", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
    *("--rollout-max-response-len", "32", "--seed", "5"),
]
JUDGE = """
import slime_core

seen = []


@slime_core.hookimpl
def slime_reward(group, ctx):
    seen.append(group.id)
    return [float(sum(s.response_tokens) % 3) for s in group.samples]
"""


class Prompts(Source):
    """Positions from 0; ends after ``count``."""

    def __init__(self, count=10_000):
        self.position, self.count = 0, count

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]

    def next(self, count):
        first = self.position
        self.position = min(first + count, self.count)
        return [
            Prompt(id=f"main/{p}", position=p, prompt="1+2=", tokens=[2, 11, 3, 13])
            for p in range(first, self.position)
        ]


@dataclasses.dataclass
class Ran:
    """What a short run did: taken groups a step, counts a step, the ledger, the engine and what was said."""

    steps: list
    counts: list
    ledger: MemoryLedger
    engine: FakeEngine
    notes: list

    def ids(self):
        return [[group.id for group in step] for step in self.steps]

    def payload(self):
        return [[sample.to_dict() for group in step for sample in group.samples] for step in self.steps]

    def balance(self):
        counts = dict(asyncio.run(self.ledger.counts()))
        dropped = {name: n for name, n in counts.items() if name.startswith("dropped/")}
        assert counts["issued"] == counts["trained"] + counts["pending"] + sum(dropped.values()), counts
        return counts


@pytest.fixture
def collect(install_plugin):
    """Run a few steps: ``collect(*flags, plugin=..., steps=..., engine=..., prompts=..., take=...)``."""
    installed = []

    def run(*flags, plugin=JUDGE, steps=3, engine=None, prompts=10_000, take=Collector.take):
        if not installed:
            install_plugin("judge", plugin)
            installed.append(plugin)
        config = load_config(None, [*FLAGS, *map(str, flags)])
        plugins = load_plugins(config)
        ran = Ran([], [], MemoryLedger(), engine or FakeEngine(vocab_size=VOCAB), [])
        try:
            asyncio.run(asyncio.wait_for(_steps(config, plugins, ran, steps, prompts, take), 20))
        finally:
            plugins.close()  # the finder of slime's modules too
        return ran

    return run


async def _steps(config, plugins, ran, steps, prompts, take):
    engine, ledger = ran.engine, ran.ledger
    ctx = Context(config=config, engine=engine, tokenizer=CharTokenizer(), sampling=training_params(config))
    await engine.load(WeightUpdate(version=0, epoch=1, transport="tensors"))
    collector = Collector(
        source=Prompts(prompts),
        ledger=ledger,
        plugins=plugins,
        ctx=ctx,
        vocab_size=VOCAB,
        steps=steps,
        note=ran.notes.append,
    )
    async with collector:
        for version in range(steps):
            groups = await take(collector, config.rollout.rollout_batch_size)
            ran.steps.append(groups)
            for group in groups:
                for sample in group.samples:
                    assert ledger.rows[sample.id].state == "finished"
                    ledger.rows[sample.id].state = "trained"
            await engine.pause("keep")
            if config.rollout.async_schedule == "lockstep":
                await collector.drain()
            await engine.load(WeightUpdate(version=version + 1, epoch=1, transport="tensors"))
            await engine.resume()
            ran.counts.append(collector.pop_counts())
            collector.admit(version + 1)
