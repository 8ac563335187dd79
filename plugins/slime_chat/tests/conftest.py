"""Sessions of agents before an engine that answers from a script."""

import asyncio

import pytest
from agent_session import Client, LetterTokenizer, LineEngine

from slime_chat import open_session
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.types import Group, Prompt, Sample, SamplingParams


@pytest.fixture(scope="session")
def letters():
    return LetterTokenizer()


@pytest.fixture
def context(letters):
    """A context around an engine that answers with ``script``."""

    def context(*script, config=Config(), sampling=SamplingParams(max_new_tokens=64), **more):  # noqa: B008
        engine = LineEngine(letters, script)
        return Context(config=config, engine=engine, tokenizer=letters, sampling=sampling, **more)

    return context


@pytest.fixture
def issue(letters):
    """A group of ``n`` pending samples."""

    def issue(n=1):
        tokens = letters.ids("Uhi|A")
        prompt = Prompt(id="main/5", position=5, prompt="hi", tokens=tokens, label="4")
        samples = [
            Sample(id=f"main/5-{j}", prompt="hi", tokens=list(tokens), label="4", group_index=5, rollout_id=j, index=j)
            for j in range(n)
        ]
        return Group(prompt=prompt, samples=samples, rollouts={j: [j] for j in range(n)})

    return issue


@pytest.fixture
def talk(issue):
    """Run ``agent(client, session)`` in a session of one sample; the session."""

    def talk(ctx, agent, *, sample=None, **options):
        async def run():
            opened = open_session(sample or issue().samples[0], ctx, **options)
            async with opened as session, Client(session) as client:
                await agent(client, session)
            return session

        return asyncio.run(run())

    return talk
