"""Two agents of two adapters: a short run is exact in all that it records; nightly: both learn their roles."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
RECIPE = Path(__file__).with_name("recipe.toml")
NAMES = ["up", "down"]


def steps_of(run):
    """The metrics of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"] for row in rows if row["kind"] == "step"]


def query(run, text):
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return ledger.execute(text).fetchall()


def test_a_short_run_keeps_adapters_apart_and_is_made_again_bit_for_bit(train, forked_slime):
    run = train(RECIPE, "--num-rollout", 3, "--save-interval", 1, "--verify-step", 2, "--rollout-batch-size", 4)
    for metrics in steps_of(run):
        for name in ("loss", "grad_norm", "reward/mean", "advantages/abs_mean", "optimizer_steps"):
            assert {f"{adapter}/{name}" for adapter in NAMES} <= metrics.keys()
        assert metrics["optimizer_steps"] == sum(metrics[f"{adapter}/optimizer_steps"] for adapter in NAMES)
    assert json.loads((run / "verify.json").read_text())["ok"]
    assert query(run, "SELECT model, count(*) FROM samples GROUP BY model") == [("down", 192), ("up", 192)]
    assert {path.name for path in (run / "final" / "adapter").iterdir()} == set(NAMES)
    again = forked_slime("replay", run, "--step", 3, "--json")
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert (answer["identical"], answer["began"]) == (True, 2)
    shown = forked_slime("show", run)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.nightly
def test_both_agents_learn_and_a_resumed_run_is_the_whole_one(train, scores, forked_slime):
    whole = train(RECIPE, "--save-interval", 20)
    assert scores(whole, "digits") == [0.0, 1.0]
    assert min(steps_of(whole)[-1][f"{name}/reward/mean"] for name in NAMES) > 0.7
    part = train(RECIPE, "--save-interval", 20, "--num-rollout", 20)
    done = forked_slime("run", "--resume", part, "--num-rollout", 30)
    assert done.returncode == 0, done.stderr
    fingerprints = "SELECT fingerprint FROM steps ORDER BY version"
    assert query(part, fingerprints) == query(whole, fingerprints)
