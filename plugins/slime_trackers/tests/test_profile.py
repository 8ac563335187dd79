"""`--profile N`: what torch's profiler records of a step, in every process that computes."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytestmark = pytest.mark.integration


def operators(path):
    """How often each operator was called, and the shapes that the matrix products had."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    return Counter(event["name"] for event in events)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], ["engine", "train-rank0"]),
        (
            ["--actor-num-gpus-per-node", "2", "--max-staleness", "1", "--no-colocate", "--kl-loss-coef", "0.1"],
            ["engine-0", "score-rank0", "score-rank1", "train-rank0", "train-rank1"],
        ),
    ],
    ids=["in one process", "two ranks and an engine apart"],
)
def test_the_profile_of_a_step_has_the_matrix_products_of_every_process(tmp_path, own, forked_slime, flags, names):
    done = forked_slime(
        "run", *own.flags, *flags, "--num-rollout", "2", "--run-dir", tmp_path / "run", "--profile", "2"
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [path.name for path in files] == [f"step-2-{name}.json" for name in names]
    for path in files:
        counts = operators(path)
        assert counts["aten::mm"] + counts["aten::addmm"] + counts["aten::matmul"] > 0, path
        assert any("backward" in name.lower() for name in counts) == ("train" in path.name), path
