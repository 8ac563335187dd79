"""Whole runs of functions that are written for THUDM/slime, on a tiny model."""

import json
import re

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system


@pytest.fixture
def words(tmp_path, functions):
    """The words of a run of two steps; ``--key fn`` names a function of run_shape.py."""
    tiny_model(tmp_path / "model", hidden=32)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"{a}+1="}) + "\n" for a in range(8)))
    (tmp_path / "custom.yaml").write_text("bonus: 2\nrollout_batch_size: 2\n")

    def words(*more, **keys):
        path = functions / "run_shape.py"
        named = [part for key, fn in keys.items() for part in (f"--{key.replace('_', '-')}-path", f"{path}:{fn}")]
        fixed = ["run", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl", "--input-key", "q"]
        fixed += ["--num-rollout", "2", "--rollout-batch-size", "64", "--n-samples-per-prompt", "2"]
        fixed += ["--rollout-max-response-len", "4", "--custom-config-path", "custom.yaml", "--run-dir", "run"]
        return [*fixed, *more, *named]

    return words


def test_a_background_worker_an_evaluation_and_custom_keys_make_a_run(words, forked_slime, tmp_path):
    rows = words(
        "--eval-interval", "1", rollout_function="generate_rollout", custom_rm="reward", eval_function="evaluate"
    )
    done = forked_slime(*rows)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert [step["reward/mean"] for step in steps] == [2.5, 2.5]
    evaluations = {(line["name"], line["version"]): line["metrics"] for line in lines if line["kind"] == "eval"}
    assert evaluations["mine", 2]["reward/mean"] == pytest.approx(2 / 3)
    assert [evaluations["extra", version]["rollouts"] for version in (1, 2)] == [1, 2]
    log = (tmp_path / "run" / "log" / "run.log").read_text()
    assert "custom.yaml sets rollout.rollout_batch_size (over command line: --rollout-batch-size)" in done.stderr
    assert log.count("generate_rollout (run_shape.py:") == 1


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "resumed before a checkpoint"])
def test_a_function_sees_every_group_of_a_step(words, forked_slime, killed):
    """Groups of odd positions are dropped: step 0 needs 0, 1, 2 and step 1 needs 3, 4, 5, 6.

    A step that is trained again has no samples of what was dropped.
    """
    keys = {"rollout_all_samples_process": "process_all", "custom_rollout_log_function": "log"}
    line = words(**keys, custom_rm="reward", dynamic_sampling_filter="keep")
    if killed:
        assert forked_slime(*line, SLIME_FAILPOINT="loop.stepped=kill").returncode != 0
        line = ["run", "--resume", "run"]
    done = forked_slime(*line)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step (\d) trained (\d) samples, saw (\d) groups", done.stdout) == [
        ("0", "4", str(3 - killed)),
        ("1", "4", str(7 - killed)),
    ]


def test_a_filter_that_fails_ends_the_run_with_one_error(words, forked_slime):
    done = forked_slime(*words(custom_rm="reward", dynamic_sampling_filter="fail"))
    assert done.returncode != 0
    assert "PLG56" in done.stderr
    assert "never retrieved" not in done.stderr
