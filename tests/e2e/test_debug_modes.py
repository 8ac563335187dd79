"""Runs that dump, that train on a dump with or without an engine, and that only roll out."""

import hashlib
import json
import sqlite3

import pytest

from slime_cli.dumps import dumps_of
from slime_core import failpoints
from slime_core.report import RunDir, history
from slime_core.rollout.dump import evaluation_path, read_dump, step_path

pytestmark = pytest.mark.system


def weights(run):
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def lines(run, kind="step"):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def plain(groups):
    return [(g.prompt, g.rollouts, [s.to_dict() for s in g.samples]) for g in groups]


def fingerprints(run):
    with sqlite3.connect(run / "ledger.sqlite") as database:
        return database.execute("SELECT version, fingerprint FROM steps ORDER BY version").fetchall()


def balance(run):
    states = history.states(RunDir(run))
    dropped = {name: count for name, count in states.items() if name.startswith("dropped/")}
    assert states["issued"] == states["trained"] + states["pending"] + sum(dropped.values()), states
    return states


@pytest.fixture
def cut():
    """Make a run stop at a failpoint: ``cut("loop.reported:2")``."""
    yield lambda place: failpoints.arm(f"{place}=raise")
    failpoints.arm("")


def test_every_step_and_evaluation_is_dumped(small):
    rows = dumps_of(small.dump)
    assert [(row["version"], row["kind"], row["stage"], row["groups"], row["samples"]) for row in rows] == [
        (1, "eval held", "warmup", 3, 3),
        (1, "step", "warmup", 2, 2),
        (2, "step", "grpo", 2, 8),
        (3, "step", "grpo", 2, 8),
        (4, "eval held", "grpo", 3, 3),
        (4, "step", "grpo", 2, 8),
    ]
    judged = [s.reward for g in read_dump(evaluation_path(small.dump, "held", 4)) for s in g.samples]
    (told,) = [row for row in lines(small.run, "eval") if row["version"] == 4]
    assert sum(judged) / 3 == told["metrics"]["reward/mean"]


def test_a_dump_is_listed(small, capsys):
    assert small.go("show", small.dump) == 0
    assert "step-000003.rollout" in capsys.readouterr().out
    assert small.go("show", small.dump, "--json") == 0
    assert [row["version"] for row in json.loads(capsys.readouterr().out)] == [1, 1, 2, 3, 4, 4]


def test_training_on_a_dump_without_engine_and_data_gives_the_same_bits(small, tmp_path):
    recipe = (small.folder / "small.toml").read_text().replace('prompt_data = "rows.jsonl"\n', "")
    (tmp_path / "bare.toml").write_text(recipe.replace('"model"', f'"{small.folder}/model"'))
    (tmp_path / "rows.jsonl").write_text("")  # the evaluation set's; nothing reads it
    (tmp_path / "digits.py").write_text("def reward(args, sample, **kw):\n    raise RuntimeError('not again')\n")
    run = tmp_path / "run"
    flags = ("--load-debug-rollout-data", small.dump, "--debug-train-only", "--run-dir", run)
    assert small.go("run", tmp_path / "bare.toml", *flags) == 0
    assert weights(run) == weights(small.run)
    assert fingerprints(run) == fingerprints(small.run)
    assert small.go("diff", small.run, run) == 0
    assert lines(run, "eval") == []  # no engine, no evaluation; weights that were sent to it would be refused
    assert balance(run)["trained"] == 26


def test_training_on_a_dump_with_the_engine_evaluates_too(small):
    run = small.again("with-engine", "--load-debug-rollout-data", small.dump)
    assert weights(run) == weights(small.run)
    untimed = [{**row, "seconds": {}} for row in lines(run, "eval")]
    assert untimed == [{**row, "seconds": {}} for row in lines(small.run, "eval")]


def test_a_cut_run_on_a_dump_goes_on_to_the_same_weights(small, tmp_path, cut):
    run = tmp_path / "run"
    flags = ("--load-debug-rollout-data", small.dump, "--debug-train-only", "--run-dir", run)
    cut("loop.stepped:4")
    assert small.go("run", small.folder / "small.toml", *flags) == 7
    failpoints.arm("")
    assert small.go("run", "--resume", run) == 0
    assert weights(run) == weights(small.run)
    assert balance(run)["issued"] == 26


def test_a_dump_that_is_too_short_ends_the_run_with_its_place(small, tmp_path, capsys):
    run = tmp_path / "run"
    flags = ("--load-debug-rollout-data", small.dump, "--debug-train-only", "--run-dir", run, "--num-rollout", "4")
    assert small.go("run", small.folder / "small.toml", *flags) == 3
    assert "DAT28" in (told := capsys.readouterr().err)
    assert "it holds steps 1 to 4" in told


ROLL = ("--debug-rollout-only", "stage.warmup.num_rollout=0")


def test_rolling_out_alone_samples_from_the_first_weights_and_trains_nothing(small, tmp_path):
    dump = tmp_path / "dump"
    run = small.again("rolled", *ROLL, "--save-debug-rollout-data", dump)
    trained = tmp_path / "trained"
    flags = ("stage.warmup.num_rollout=0", "--num-rollout", "1", "--run-dir", tmp_path / "run")
    assert small.go("run", small.folder / "small.toml", *flags, "--save-debug-rollout-data", trained) == 0
    assert plain(read_dump(step_path(dump, 1))) == plain(read_dump(step_path(trained, 1)))
    samples = [s for version in (1, 2, 3) for g in read_dump(step_path(dump, version)) for s in g.samples]
    assert {v for s in samples for v in s.weight_versions} == {0}
    states = balance(run)
    assert (states["issued"], states["dropped/debug_rollout_only"], states["trained"]) == (24, 24, 0)
    assert not (run / "final").exists()
    assert [row["version"] for row in lines(run)] == [1, 2, 3]
    assert all(row["metrics"]["staleness/max"] == 0 and "loss" not in row["metrics"] for row in lines(run))


def test_a_cut_rollout_goes_on_and_takes_the_same_groups(small, tmp_path, cut):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = small.folder / "small.toml"
    assert small.go("run", recipe, *ROLL, "--save-debug-rollout-data", whole, "--run-dir", tmp_path / "a") == 0
    cut("loop.reported:3")
    assert small.go("run", recipe, *ROLL, "--save-debug-rollout-data", parts, "--run-dir", tmp_path / "b") == 7
    failpoints.arm("")
    assert small.go("run", "--resume", tmp_path / "b") == 0
    for version in (1, 2, 3):
        assert plain(read_dump(step_path(parts, version))) == plain(read_dump(step_path(whole, version)))
    assert balance(tmp_path / "b") == balance(tmp_path / "a")


def test_a_step_that_does_not_train_cannot_be_verified(small, tmp_path, capsys):
    flags = (*ROLL, "--verify-step", "1", "--run-dir", tmp_path / "run")
    assert small.go("run", small.folder / "small.toml", *flags) == 2
    assert "debug_rollout_only" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_plan_of_training_on_a_dump_needs_no_data(small, tmp_path, capsys):
    (tmp_path / "bare.toml").write_text(f'[rollout]\nhf_checkpoint = "{small.folder}/model"\n')
    flags = ("--dry-run", "--debug-train-only", "--load-debug-rollout-data")
    assert small.go("run", tmp_path / "bare.toml", *flags, small.dump) == 0
    assert "0+0=" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert small.go("run", tmp_path / "bare.toml", *flags, tmp_path / "empty") == 3


POST = """
def post(args, samples):
    raw = [s.reward for s in samples]
    return raw, [len(s.response) + s.metadata["seen"] for s in samples]


def note(args, sample, **kw):
    sample.metadata["seen"] = len(sample.prompt)
"""


def test_functions_by_path_see_the_samples_that_were_dumped_or_recorded(small, tmp_path):
    (tmp_path / "post.py").write_text(POST)
    flags = (
        *("--custom-reward-post-process-path", f"{tmp_path}/post.py:post", "stage.warmup.num_rollout=0"),
        *("--rollout-sample-hook-path", f"{tmp_path}/post.py:note", "--num-rollout", "2"),
    )
    recipe, dump = small.folder / "small.toml", tmp_path / "dump"
    assert small.go("run", recipe, *flags, "--save-debug-rollout-data", dump, "--run-dir", tmp_path / "a") == 0
    loaded = ("--load-debug-rollout-data", dump, "--debug-train-only")
    assert small.go("run", recipe, *flags, *loaded, "--run-dir", tmp_path / "b") == 0
    assert weights(tmp_path / "b") == weights(tmp_path / "a") != weights(small.run)
    assert small.go("replay", tmp_path / "a", "--step", "2") == 0
