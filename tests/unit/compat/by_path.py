"""Fixtures: a tokenizer of characters, an engine that answers from a script, and functions loaded by path."""

import asyncio

import pytest

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.plugins import load_plugins
from slime_core.testing.fakes import FakeEngine
from slime_core.types import Completion, Group, Prompt, Sample, SamplingParams


class ScriptedEngine(FakeEngine):
    """Answers with the text of the first entry whose key the prompt ends with; the end token closes it."""

    def __init__(self, tokenizer, script):
        super().__init__(vocab_size=len(tokenizer))
        self.version, self._tokenizer, self._script = 2, tokenizer, script
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        prompt = self._tokenizer.decode(request.tokens)
        text = next(text for end, text in self._script.items() if prompt.endswith(end))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, self._tokenizer.eos_token_id][: request.params.max_new_tokens]
        finish = "stop" if ids[-1] == self._tokenizer.eos_token_id else "length"
        return Completion(
            id=request.id,
            tokens=ids,
            log_probs=[-0.5] * len(ids),
            plain_log_probs=[-0.5] * len(ids),
            finish=finish,
            versions=[self.version] * len(ids),
            text=text,
        )


@pytest.fixture(scope="session")
def tokenizer():
    from slime_core.testing.models import VOCAB, char_tokenizer

    return char_tokenizer(VOCAB + "<>_")


@pytest.fixture
def connect(tokenizer):
    """Plugins of a config with functions by path, and a context around a scripted or uniform engine."""
    built = []

    def connect(config, script=None, **changes):
        plugins = load_plugins(config)
        built.append(plugins)
        engine = ScriptedEngine(tokenizer, script) if script else FakeEngine(vocab_size=len(tokenizer), stop_token=1)
        engine.version = 2
        params = changes.pop("sampling", SamplingParams(max_new_tokens=64))
        return plugins, Context(
            config=config, engine=engine, tokenizer=tokenizer, sampling=params, version=2, **changes
        )

    yield connect
    for plugins in built:
        plugins.close()


@pytest.fixture
def make_group(tokenizer):
    """A group of pending samples of one prompt."""

    def make_group(text="1+1=", label="2", n=2, position=5):
        prompt = Prompt(
            id=f"main/{position}",
            position=position,
            prompt=text,
            tokens=tokenizer.encode(text, add_special_tokens=False),
            label=label,
        )
        samples = [
            Sample(
                id=f"main/{position}-{j}",
                prompt=text,
                tokens=list(prompt.tokens),
                label=label,
                group_index=position,
                index=position * n + j,
                rollout_id=position * n + j,
            )
            for j in range(n)
        ]
        return Group(prompt=prompt, samples=samples, rollouts={position * n + j: [j] for j in range(n)})

    return make_group


@pytest.fixture
def write(tmp_path):
    """Write a file of functions; the answer is its path."""

    def write(source, name="mine.py"):
        (tmp_path / name).write_text(source)
        return str(tmp_path / name)

    return write


@pytest.fixture
def by(write):
    """A config whose key names a function of the given source."""

    def by(source, fn="fn", **keys):
        path = write(source)
        sections = {}
        for key, value in keys.items():
            section = next(s for s in Config.model_fields if hasattr(getattr(Config(), s), key))
            sections.setdefault(section, {})[key] = f"{path}:{fn}" if value is True and "path" in key else value
        return Config(**sections)

    return by
