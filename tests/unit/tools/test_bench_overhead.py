"""The benchmark of what a step costs beside computing: a whole run."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize(("ledger", "ranks"), [("none", 0), ("durable", 2)])
def test_a_run_on_parts_that_take_no_time_is_measured(monkeypatch, ledger, ranks):
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_overhead")
    found = tool.row(16, ledger, tool.parse(["--steps", "2", "--skip", "1", "--ranks", str(ranks)]))
    assert set(found) == {*tool.PARTS, "after", "cpu", "wall"}
    assert all(value > 0 for value in found.values()), found
