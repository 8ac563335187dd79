"""Plugins from source text, a group of two samples, and the facade around them."""

import asyncio
from dataclasses import replace

import pytest

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.notices import notices_to
from slime_core.plugins import load_plugins
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Group, Prompt, Sample, SamplingParams


@pytest.fixture
def load(install_plugin):
    """Install plugins given as name=source and load them; further arguments are config sections."""
    built = []

    def load(config=None, **sources):
        for name, source in sources.items():
            install_plugin(name, "import slime_core\n" + source)
        plugins = load_plugins(Config(plugins=tuple(sources), **(config or {})))
        built.append(plugins)
        return plugins

    yield load
    for plugins in built:
        plugins.close()


@pytest.fixture
def group():
    prompt = Prompt(id="main/3", position=3, prompt="1+1=", tokens=[2, 12, 2, 13], label="2")
    samples = [
        Sample(id=f"main/3-{j}", prompt=prompt.prompt, tokens=list(prompt.tokens), label="2", group_index=3)
        for j in range(2)
    ]
    return Group(prompt=prompt, samples=samples, rollouts={6: [0], 7: [1]})


@pytest.fixture
def ctx():
    engine = FakeEngine()
    engine.version = 0
    return Context(
        config=Config(), engine=engine, tokenizer=CharTokenizer(), sampling=SamplingParams(max_new_tokens=5)
    )


@pytest.fixture
def ask(group, ctx):
    """Run one facade method on the group."""

    def ask(facade, method, **sections):
        return asyncio.run(getattr(facade, method)(group, replace(ctx, config=Config(**sections))))

    return ask


@pytest.fixture
def said():
    """What was said to people."""
    lines = []
    with notices_to(lines.append):
        yield lines


@pytest.fixture
def generated(group):
    """The group with responses, as a reward sees it."""
    for sample in group.samples:
        sample.append_response([3, 4], [-0.5, -0.25], text="12", version=0)
        sample.reward = 1.0
    return group
