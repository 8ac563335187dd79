"""Best and worst samples, and text that a terminal must not obey."""

import json

import pytest

from slime_core.report.samples import LIMIT, SampleLog, pick, prompt_text
from slime_core.report.text import safe_text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("count", "picked"),
    [
        (0, []),
        (1, ["best main/1-0"]),
        (2, ["best main/1-0", "worst main/0-1"]),
        (3, ["best main/1-0", "best main/0-0", "worst main/0-1"]),
        (4, ["best main/1-0", "best main/0-0", "worst main/0-1", "worst main/1-1"]),
        (9, ["best main/1-0", "best main/0-0", "best main/1-1", "best main/0-1"]),
    ],
)
def test_half_are_the_best_and_half_the_worst_and_nobody_is_named_twice(group, count, picked):
    groups = [group(0, [0.5, -1.0], [1, 1]), group(1, [2.0, 0.0], [1, 1])]
    assert [f"{rank} {sample.id}" for rank, sample in pick(groups, count)] == picked


def test_samples_without_a_reward_are_left_out(group):
    assert [s.id for _, s in pick([group(0, [None, 1.0], [1, 1])], 4)] == ["main/0-1"]


def test_a_line_has_everything_to_judge_a_sample(group, tmp_path):
    one = group(0, [0.5], [2], terms={"format": 1.0})
    one.samples[0].response = "\x1b[2J\ud800" + "x" * (2 * LIMIT)
    log = SampleLog(tmp_path / "samples.jsonl", 4)
    log.write(7, [one])
    log.write(8, [])
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert set(row) == {
        *("version", "rank", "id", "task", "model", "reward", "status", "response_length", "terms"),
        *("prompt", "response", "label"),
    }
    assert (row["version"], row["rank"], row["reward"], row["label"]) == (7, "best", 0.5, "L")
    assert row["terms"] == {"format": 1.0}
    assert len(row["response"]) < LIMIT + 50
    assert row["response"].startswith("\x1b[2J\ud800")


def test_chat_prompts_become_lines():
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]
    assert prompt_text(chat) == "system: Be short.\nuser: 1+1?"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        pytest.param("plain ünïcode 漢字\n\tx", "plain ünïcode 漢字\n\tx", id="ordinary text stays"),
        pytest.param("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m", id="colour"),
        pytest.param("\x1b]0;title\x07", "\\x1b]0;title\\x07", id="window title"),
        pytest.param("a\rb\x08c\x7f", "a\\x0db\\x08c\\x7f", id="overwriting"),
        pytest.param("\x9b2J", "\\x9b2J", id="eight-bit escape"),
        pytest.param("a\u202eb", "a\\u202eb", id="direction"),
        pytest.param("\ud800", "\\ud800", id="half a character"),
        pytest.param("[bold]x[/bold]", "[bold]x[/bold]", id="markup is text"),
    ],
)
def test_terminal_controls_become_visible(text, safe):
    assert safe_text(text) == safe
    safe.encode()
