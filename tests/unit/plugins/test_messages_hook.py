"""`slime_messages` says what the chat template renders for a row, of a file as of a plugin; figures of samples too."""

import json

import pytest

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.opening import eval_sets, open_source
from slime_core.errors import PluginError
from slime_core.report.metrics import evaluation_metrics, rollout_metrics
from slime_core.testing.models import char_tokenizer

pytestmark = pytest.mark.unit

HOOK = (
    "@slime_core.hookimpl\ndef slime_messages(messages, tools, metadata, task, ctx):\n"
    "    first = {'role': 'system', 'content': f\"{task} {metadata.get('n')} {ctx.evaluation}\"}\n"
    "    return [first, *messages], [*(tools or []), {'name': 'more'}]\n"
)
ROWS = (
    "from slime_core.types import Prompt\nclass Rows:\n    def __len__(self):\n        return 1\n"
    "    def at(self, position):\n        return Prompt(id='', position=position, prompt='hi', metadata={'n': 2})\n"
    "    def state(self):\n        return {}\n@slime_core.hookimpl\ndef slime_prompts(task, ctx):\n    return Rows()\n"
)


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}: {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer("".join(map(chr, range(32, 127))) + "\n", TEMPLATE)


def texts(tokenizer, prompts):
    return [tokenizer.decode(prompt.tokens) for prompt in prompts]


@pytest.fixture
def file(tmp_path):
    row = {"input": "hi", "tools": [{"name": "own"}], "metadata": {"n": 1}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return str(tmp_path / "rows.jsonl")


def test_rows_of_files_plugins_and_evaluations_are_rewritten(load, file, tokenizer):
    data = {"apply_chat_template": True}
    config = Config(data={**data, "prompt_data": file, "tool_key": "tools"}, eval={"eval_prompt_data": ("set", file)})
    plugins, ctx = load(geo=HOOK), Context(config=config)
    (text,) = texts(tokenizer, open_source(config, plugins, tokenizer, ctx).next(1))
    assert text == "own more : system: default 1 False\nuser: hi\nassistant: "
    (evaluated,) = eval_sets(config, plugins, tokenizer, Context(config=config, evaluation=True))
    assert texts(tokenizer, evaluated.prompts) == ["own more : system: default 1 True\nuser: hi\nassistant: "]
    own = Config(data=data)
    (text,) = texts(tokenizer, open_source(own, load(own=ROWS + HOOK), tokenizer, Context(config=own)).next(1))
    assert text == "more : system: default 2 False\nuser: hi\nassistant: "


def test_without_a_template_or_the_hook_rows_stay(load, file, tokenizer):
    config = Config(data={"prompt_data": file})
    assert texts(tokenizer, open_source(config, load(geo=HOOK), tokenizer, Context(config=config)).next(1)) == ["hi"]
    config = Config(data={"prompt_data": file, "apply_chat_template": True})
    (text,) = texts(tokenizer, open_source(config, load(), tokenizer, Context(config=config)).next(1))
    assert text == ": user: hi\nassistant: "


@pytest.mark.parametrize("value", ["messages", "(messages,)"])
def test_a_hook_that_returns_something_else_is_named_with_the_row(load, file, tokenizer, value):
    config = Config(data={"prompt_data": file, "apply_chat_template": True})
    plugins = load(geo=f"@slime_core.hookimpl\ndef slime_messages(messages):\n    return {value}\n")
    with pytest.raises(PluginError, match=r"geo.slime_messages returned.*rows.jsonl:1.*return messages, tools"):
        open_source(config, plugins, tokenizer, Context(config=config)).next(1)


def test_figures_of_samples_are_reported_as_means(generated):
    first, second = generated.samples
    first.metadata["metrics"] = {"geo/turns": 3}
    assert rollout_metrics([generated], 0, {}, 1)["geo/turns/mean"] == 3.0
    second.metadata["metrics"] = {"geo/turns": 2}
    assert evaluation_metrics([generated])["geo/turns/mean"] == 2.5
    second.metadata["metrics"] = "a row's own word"
    assert evaluation_metrics([generated])["geo/turns/mean"] == 3.0
