"""Environments of the released openenv-core, unmodified, in a process of their own."""

import asyncio
import re
from pathlib import Path

import pytest
from openenv_play import context, group_of, play, started
from recorded import steps_of

from slime_core.testing import tiny_model
from slime_core.testing.models import CHAT_TEMPLATE
from slime_core.types import Status
from slime_openenv.options import Options

pytestmark = [pytest.mark.environments, pytest.mark.system]
HERE = Path(__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.fixture(scope="module")
def released(environments_python, tmp_path_factory):
    """The address of a server with both environments."""
    folder = tmp_path_factory.mktemp("released")
    with started(folder / "log", environments_python, HERE / "openenv_released.py", "{port}", folder) as url:
        yield url


def test_the_recipe_of_the_documentation_trains_on_the_template_of_openenv_init(released, forked_slime, tmp_path):
    """The template's server has room for one session: eight episodes wait for it."""
    (recipe,) = [
        block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S) if "# recipe.toml" in block
    ]
    assert len(recipe.splitlines()) <= 30
    (tmp_path / "recipe.toml").write_text(recipe.replace("http://127.0.0.1:8000", f"{released}/echo"))
    tiny_model(tmp_path / "model", hidden=32, chat_template=CHAT_TEMPLATE)
    flags = (
        "--hf-checkpoint",
        "model",
        "--lr",
        "1e-2",
        "--dtype",
        "float32",
        "--cpu-threads",
        "1",
        "--run-dir",
        "run",
    )
    evaluation = ('eval.eval_tasks=[{name = "echo_heldout", plugin = "openenv"}]', "plugin.openenv.heldout_episodes=2")
    done = forked_slime("run", "recipe.toml", *flags, *evaluation, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps, counts = steps_of(tmp_path / "run", 2)
    assert counts["trained"] == counts["issued"] == 16
    for sample in (sample for step in steps for sample in step):
        said, rewards = [], sample.metadata["openenv"]["turn_rewards"]
        for heard in sample.response.split("user: You said ")[1:]:
            said.append(int(heard.split()[0]))
        assert rewards[:2] == pytest.approx([0.1 * length for length in said])
        assert sample.reward == pytest.approx(sum(rewards))
        assert sum(sample.loss_mask) <= 18 < sample.response_length


def test_tools_of_an_mcp_environment_are_offered_and_called(released):
    """Two calls, one of them wrong, then the one that ends the episode; and an answer without a call."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE

    def call(name, **arguments):
        words = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
        return f'<tool_call>{{"name": "{name}", "arguments": {{{words}}}}}</tool_call>'

    answers = iter(
        [call("add", a=1, b=2) + call("sub", a=1, b=2), call("add", a=1), call("add", a=3, b=4), "the answer is 7"]
    )

    async def run():
        options = Options(url=[f"{released}/tools"], tools="hermes")
        ctx = context(options, lambda text: next(answers), template=template)
        done = await play(ctx, group_of(1, prompt="What is 3 + 4?"))
        return [*done, *await play(ctx, group_of(1, 1))], ctx

    ((sample, reward), (other, nothing)), ctx = asyncio.run(run())
    text = ctx.tokenizer.decode(sample.tokens)
    assert text.startswith("[{")
    assert '"add"' in text[: text.index("user: ")]
    assert "user: What is 3 + 4?" in text
    assert "tool: 3\ntool: Error: Unknown tool: 'sub'\nassistant: " in text
    assert "tool: Error: " in text.partition("assistant: <tool_call>")[2]
    assert sample.metadata["openenv"] == {"turn_rewards": [0.5, 0.0, 0.5], "invalid": 0, "ended": "done"}
    assert (reward.value, sample.status) == (1.0, Status.COMPLETED)
    assert (other.metadata["openenv"]["ended"], nothing.value) == ("answer", 0.0)
