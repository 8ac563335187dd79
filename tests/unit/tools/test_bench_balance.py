"""The figures of how evenly ranks are dealt, on a small step."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_balance")


def test_the_way_ranks_are_dealt_is_more_even_than_the_way_before_it_and_sends_a_share(tool):
    args = tool.parse(["--prompts", "32", "--median", "200", "--longest", "2000", "--max-tokens", "4096"])
    row = tool.measure(args, 4)
    assert 1.0 <= row.now < min(row.before, 1.1)
    assert row.part < 1.3 * row.whole / 4


def test_the_load_of_a_pack_counts_a_shared_prompt_once(tool):
    args = tool.parse(["--prompts", "1", "--samples", "2", "--median", "20"])
    batch = tool.draw(args, 0)
    (micros,) = tool.in_turn(batch, 1, 4096)
    prompt = float(batch.lengths[0] - batch.response_lengths[0])
    rest = sum(tool.FLOPS.sequence(float(length), prompt) for length in batch.lengths)
    assert tool.load(micros) == pytest.approx(tool.FLOPS.sequence(prompt) + rest)
