"""Whole runs on tasks of reasoning_gym: ten tasks by flags, and levels through a kill."""

import json
from pathlib import Path

import pytest

from slime_core.testing import tiny_model
from slime_core.testing.models import CHAT_TEMPLATE, VOCAB

pytestmark = pytest.mark.integration

TEN = (
    *("chain_sum", "gcd", "letter_counting", "spell_backward", "count_bits"),
    *("leg_counting", "number_sorting", "fraction_simplification", "syllogism", "prime_factorization"),
)
KILL = """
import os
import signal

def hook(args, sample, **kwargs):
    if sample.id == os.environ.get("KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "model"
    return tiny_model(path, hidden=32, vocab=VOCAB + "<>/_@[]{}|\\", context_len=2048, chat_template=CHAT_TEMPLATE)


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["version"]: row["metrics"] for row in rows if row["kind"] == "step"}


def test_ten_tasks_train_and_are_evaluated_by_flags(cli, chat_model):
    names = ",".join(f"{name}:0.5" for name in TEN)
    done = cli(
        *("run", "--plugin", "reasoning_gym", "--hf-checkpoint", chat_model, "--tasks", names),
        *("--eval-tasks", "chain_sum,gcd.0", "--heldout-rows", "3", "--skip-eval-before-train", "--run-dir", "run"),
        *("--num-rollout", "2", "--rollout-batch-size", "20", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "8", "--cpu-threads", "1"),
    )
    assert done.code == 0, done.err
    steps = metrics(Path("run"))
    assert {name for row in steps.values() for name in TEN if f"task/{name}/reward" in row} == set(TEN)
    assert "gcd.0 at step 2" in done.err
    assert "80 issued = 80 trained" in done.err
    done = cli("eval", "run/final", "--plugin", "reasoning_gym", "--eval-tasks", "lcm", "--heldout-rows", "2")
    assert done.code == 0, done.err
    assert "lcm" in done.out


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param((), id="in turn", marks=pytest.mark.nightly),
        pytest.param(
            ("--max-staleness", "1", "--no-colocate", "--async-schedule", "lockstep"),
            id="a step ahead",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_levels_move_and_a_run_that_was_killed_has_the_same_rows_and_weights(
    forked_slime, chat_model, tmp_path, ahead
):
    (tmp_path / "kill.py").write_text(KILL)
    flags = (
        *("--plugin", "reasoning_gym", "--hf-checkpoint", chat_model, "--tasks", "chain_sum,gcd"),
        *("--curriculum", "true", "--start-level", "2", "--level-groups", "3", "--level-down", "0.5"),
        *("--num-rollout", "5", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--save-interval", "2"),
        *("--dtype", "float32", *ahead),
        *("--rollout-sample-hook-path", "kill.py:hook", "--answer", "response"),
        *("--rollout-max-response-len", "4", "--cpu-threads", "1"),
    )
    whole = forked_slime("run", *flags, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stderr
    assert forked_slime("run", *flags, "--run-dir", "killed", KILL="main/14-1").returncode != 0
    again = forked_slime("run", "--resume", "killed")
    assert again.returncode == 0, again.stderr
    runs = [tmp_path / name for name in ("whole", "killed")]
    levels = [
        {version: {key: row[key] for key in row if "/level/" in key} for version, row in metrics(run).items()}
        for run in runs
    ]
    assert levels[0] == levels[1]
    assert {1.0, 2.0} <= {value for row in levels[0].values() for value in row.values()}
    files = [(run / "final" / "model.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]
