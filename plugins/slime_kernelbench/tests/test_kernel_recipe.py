"""The default recipe from end to end, with a few steps of each stage: what it writes down fits together."""

import json
from pathlib import Path

import pytest

import slime_kernelbench
from slime_kernelbench.records import read

pytestmark = pytest.mark.integration

RECIPE = Path(slime_kernelbench.__file__).parent / "recipes" / "default.toml"
SMALLER = {
    "../model": str(RECIPE.parents[1] / "model"),
    "cpu_threads = 2": "cpu_threads = 1",
    "rollout_max_response_len = 160": "rollout_max_response_len = 24",
    "family_heldout = 96": "family_heldout = 3",
    "num_rollout = 700": "num_rollout = 3",
    "rollout_batch_size = 32": "rollout_batch_size = 8",
    "num_rollout = 13": "num_rollout = 2",
    "rollout_batch_size = 16": "rollout_batch_size = 2",
    "n_samples_per_prompt = 8": "n_samples_per_prompt = 4",
}


def test_both_stages_run_and_every_turn_is_written_down(forked_slime, tmp_path):
    text = RECIPE.read_text()
    for given, smaller in SMALLER.items():
        assert text.count(given) == 1, given
        text = text.replace(given, smaller)
    (tmp_path / "small.toml").write_text(text)
    done = forked_slime("run", "small.toml", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["stage"] for row in steps] == ["warmup"] * 3 + ["grpo"] * 2
    assert steps[2]["metrics"]["loss"] < steps[0]["metrics"]["loss"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert [row["version"] for row in evaluations] == [3, 5]
    for row in evaluations:
        assert row["metrics"]["reward/solved/mean"] == 0.0  # three steps teach nobody
        assert row["metrics"]["prompts"] == 3
    turns = list(read(tmp_path / "run"))
    dialogues = {(turn["version"], turn["evaluation"], turn["id"].split(".")[0]) for turn in turns}
    assert len([name for name in dialogues if not name[1]]) == 2 * 2 * 4
    assert {turn["verdict"]["status"] for turn in turns} == {"rejected"}  # 24 tokens hold no kernel
    assert all(len(turn["prompt_ids"]) == turn["prompt_tokens"] for turn in turns)
    told = [turn["feedback"] for turn in turns if turn["turn"] + 1 < turn["turns"]]
    assert set(told) == {"rejected: no_code"}
