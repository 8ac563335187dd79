"""Which figures of two runs part them, and which tell only how a step was checked, moved or supplied."""

import pytest

from slime_cli.replaying.compare import StepPair, _metrics

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name", ["canary/compare_seconds", "canary/logprob_diff_mean", "swap/publish_seconds", "ledger/pending"]
)
def test_figures_of_checks_and_of_memory_that_moved_part_no_runs(name):
    """Two runs of the same seed took other times over the same step."""
    pair = StepPair(version=3, stage=("main", "main"), parts={})
    part = _metrics(pair, {name: 0.5, "loss": 1.0}, {name: 0.7, "loss": 1.0})
    assert part.verdict == "same"
    assert pair.bookkeeping == {name: (0.5, 0.7)}


def test_a_figure_of_the_step_itself_parts_them():
    pair = StepPair(version=3, stage=("main", "main"), parts={})
    assert _metrics(pair, {"loss": 1.0, "canary/kl": 0.0}, {"loss": 1.5, "canary/kl": 0.1}).verdict == "differs"
    assert pair.metrics == {"loss": (1.0, 1.5)}
