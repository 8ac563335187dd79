"""The plugin keeps its contract, its example runs as it is printed, and every template that takes tools takes results."""

import json
import re
import sys
from pathlib import Path

import pytest
from mcp_tasks import ASK, TEMPLATES

from slime_core.config.schema import Config
from slime_core.data.tool_calls import parser_of, template_tools
from slime_core.data.turns import Speech
from slime_core.testing.models import char_tokenizer, tiny_model
from slime_core.testing.plugins import check_plugin
from slime_mcp import plugin
from slime_mcp.dialogue import Talk
from slime_mcp.servers import ToolResult

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).parents[3] / "docs" / "environments.md"
LETTERS = "".join(map(chr, range(32, 127))) + "\n｜▁"


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("mcp") if finding.status == "fail"] == []


def test_a_run_without_a_chat_template_is_refused():
    (problem,) = plugin.slime_config_rules(Config(plugins=["mcp"]))
    assert problem.fix == "--apply-chat-template"
    assert plugin.slime_config_rules(Config(plugins=["mcp"], data={"apply_chat_template": True})) == []


def test_the_printed_example_runs(forked_slime, tmp_path):
    section = GUIDE.read_text().partition("## MCP\n")[2].partition("\n## ")[0]
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "toml"))
    assert recipe.count("\n") <= 30
    (tmp_path / "tools.py").write_text(code)
    (tmp_path / "recipe.toml").write_text(recipe.replace('command = "python', f'command = "{sys.executable}'))
    (tmp_path / "rows.jsonl").write_text(re.search(r"`(\{\"question.*?\})`", section)[1] + "\n")
    template = (TEMPLATES / "qwen3.jinja").read_text()
    tiny_model(tmp_path / "Qwen3-0.6B", hidden=32, vocab=LETTERS, context_len=2048, chat_template=template)
    small = (
        "--num-rollout",
        1,
        "--rollout-batch-size",
        1,
        "--n-samples-per-prompt",
        2,
        "--rollout-max-response-len",
        8,
    )
    done = forked_slime("run", "recipe.toml", "--run-dir", "run", *small, "--cpu-threads", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["metrics"]["mcp/turns/mean"] == 1


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "deepseekv3", "deepseek_r1_distill"]
)
def test_results_follow_an_answer_as_the_template_writes_them(name):
    tokenizer = char_tokenizer(LETTERS, (TEMPLATES / f"{name}.jinja").read_text())
    template = template_tools(tokenizer)
    talk = Talk(speech=Speech(tokenizer, template=True), parser=parser_of(template.parser), plain=False)
    text = tokenizer.decode(talk.results([("add", ToolResult(text="three")), ("add", ToolResult(text="four"))], []))
    assert 0 < text.index("three") < text.index("four")
    messages = [*ASK, {"role": "assistant", "content": "Qturnq"}]
    messages += [{"role": "tool", "name": "add", "tool_call_id": "c", "content": word} for word in ("three", "four")]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).endswith(
        f"Qturnq{text}"
    )


def test_a_template_that_refuses_results_is_an_error_at_the_start(context, tmp_path):
    refusing = char_tokenizer(
        LETTERS,
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ tools }}{{ messages }}",
    )
    with pytest.raises(plugin.DataError, match="refuses these messages: no tools"):
        plugin.slime_messages(list(ASK), None, {}, context("x", tokenizer=refusing, tool_parser="hermes"))
