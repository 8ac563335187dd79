"""`slime run --resume`: runs that were stopped go on to the same weights, and nothing is started again in silence."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from slime_cli.main import main
from slime_cli.trim import evaluations_kept
from slime_core import failpoints
from slime_core.checkpoint import LoadedCheckpoint
from slime_core.report import RunDir, history

pytestmark = pytest.mark.integration


def weights(path):
    """A hash of the trained model."""
    return hashlib.sha256((Path(path) / "final" / "model.safetensors").read_bytes()).hexdigest()


def figures(path):
    """Every line of metrics.jsonl, but for wall times and what the ledger held by then: a replayed step finds more."""
    rows = list(history.read_lines(RunDir(Path(path)).metrics))
    for row in rows:
        del row["seconds"]
        held = [name for name in row["metrics"] if name.startswith(("ledger/", "rollout/issued"))]
        for name in held:
            del row["metrics"][name]
    return rows


def info(path):
    return json.loads((Path(path) / "run.json").read_text())


@pytest.fixture(scope="module")
def whole(make_own, tmp_path_factory):
    """The same run, never stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert main([str(word) for word in ("run", *make_own().flags, "--run-dir", path)]) == 0
    return path


def test_a_stopped_run_goes_on_to_the_same_weights_and_figures(cli, halted, whole):
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert done.out == f"{halted}\n"
    assert f"resume {halted} from checkpoint 2, epoch 2" in done.err
    assert weights(halted) == weights(whole)
    assert figures(halted) == figures(whole)
    assert info(halted)["status"] == "finished"


def test_figures_of_steps_that_are_made_again_are_written_once(cli, own, halted, whole):
    """A run that is cut off between two checkpoints repeats steps: their old lines go."""
    shutil.rmtree(halted / "checkpoints" / "step-2")
    with (halted / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "version": 3, "to')
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert figures(halted) == figures(whole)
    rows = [row["version"] for row in history.read_lines(halted / "samples.jsonl")]
    assert rows == [row["version"] for row in history.read_lines(whole / "samples.jsonl")]


def test_a_resume_that_ends_after_it_trimmed_the_figures_is_made_again(cli, halted, whole):
    """The failpoint `rundir.metrics.trimmed`: every resume may itself be cut off."""
    shutil.rmtree(halted / "checkpoints" / "step-2")
    failpoints.arm("rundir.metrics.trimmed=raise")
    try:
        assert cli("run", "--resume", halted).code == 7
    finally:
        failpoints.arm("")
    assert figures(halted) == []
    assert RunDir(halted).holder() is None
    assert cli("run", "--resume", halted).code == 0
    assert figures(halted) == figures(whole)
    assert info(halted)["epoch"] == 3


@pytest.mark.parametrize(
    ("stage", "step", "due", "kept"),
    [
        (0, 0, True, 0),  # before the first step, still to be evaluated
        (0, 0, False, 1),
        (0, 3, False, 1),  # evaluated after the third step, or not at all
        (0, 3, True, 0),  # stopped in that evaluation
        (1, 0, True, 1),  # the stage before ended with one, this one has not begun with its own
        (1, 0, False, 2),
        (1, 2, False, 1),
    ],
)
def test_evaluations_that_will_be_made_again_are_known(stage, step, due, kept):
    state = {"stage": stage, "step": step, "eval_due": due}
    found = LoadedCheckpoint(path=Path("x"), version=4, epoch=1, state=state, config={}, plugins="", machine={})
    assert evaluations_kept(found) == kept
    assert evaluations_kept(None) == 0


def test_more_steps_go_on_from_the_end_of_a_finished_run(cli, own, whole):
    assert cli("run", *own.flags, "--num-rollout", "3", "--run-dir", "short").code == 0
    assert weights("short") != weights(whole)
    done = cli("run", "--resume", "short", "--num-rollout", "4")
    assert done.code == 0, done.err
    assert "rollout.num_rollout" in done.err
    assert "safe: a longer or shorter run" in done.err
    assert weights("short") == weights(whole)
    assert [start["from_version"] for start in info("short")["starts"]] == [0, 3]


@pytest.mark.parametrize("steps", [(), ("--num-rollout", "2")], ids=["as many", "fewer"])
def test_a_finished_run_is_already_finished(cli, whole, steps):
    """Exit 0, and nothing is touched."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    done = cli("run", "--resume", whole, *steps, "--json")
    assert done.code == 0
    assert "already finished: 4 steps are done" in done.err
    assert json.loads(done.out)["version"] == 4
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_fewer_steps_than_are_done_end_a_stopped_run(cli, halted):
    """Lowered below what is done, nothing trains any more; the model is written."""
    done = cli("run", "--resume", halted, "--num-rollout", "1")
    assert done.code == 0, done.err
    assert info(halted)["version"] == 2
    assert (halted / "final" / "model.safetensors").exists()
    assert [row["version"] for row in figures(halted) if row["kind"] == "step"] == [1, 2]


def test_without_a_checkpoint_it_starts_again_from_the_ledger_and_says_so(cli, halted, whole):
    """What was recorded is not sampled again."""
    shutil.rmtree(halted / "checkpoints")
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert "there is no checkpoint. It starts again at version 0 FROM THE LEDGER" in done.err
    assert "2 recorded steps" in done.err
    assert weights(halted) == weights(whole)
    assert history.states(RunDir(halted))["issued"] == 16


def test_without_checkpoint_and_samples_there_is_nothing_to_resume(cli, halted):
    """Never a silent fresh start."""
    shutil.rmtree(halted / "checkpoints")
    for path in halted.glob("ledger.sqlite*"):
        path.unlink()
    done = cli("run", "--resume", halted)
    assert done.code == 2
    assert "error CFG14" in done.err
    assert "fix: start another run" in done.err
    assert not list((halted / "checkpoints").iterdir())
    assert RunDir(halted).holder() is None
    again = cli("run", "--resume", "auto", "--run-dir", halted)
    assert again.code == 2, "figures say that steps were made"


def test_a_folder_that_is_no_run_cannot_be_resumed(cli, tmp_path):
    done = cli("run", "--resume", tmp_path)
    assert done.code == 2
    assert "error CFG05" in done.err


def test_auto_says_that_it_starts_afresh_and_later_what_it_resumes(cli, own, whole, monkeypatch):
    """`--resume auto` is explicit both ways."""
    monkeypatch.setenv("HALT", "main/4-0")
    first = cli("run", *own.flags, "--resume", "auto")
    assert (first.code, first.out) == (75, "")
    assert "no unfinished run of 'run'" in first.err
    assert "a fresh start" in first.err
    monkeypatch.delenv("HALT")
    second = cli("run", *own.flags, "--resume", "auto")
    assert second.code == 0, second.err
    assert f"resume auto: {Path.cwd()}/runs/run-0" in second.err
    assert weights("runs/run-0") == weights(whole)
    monkeypatch.setenv("HALT", "main/0-0")
    third = cli("run", *own.flags, "--resume", "auto")
    assert third.code == 75
    assert "a fresh start" in third.err
    assert sorted(os.listdir("runs")) == ["run-0", "run-1"]


def test_auto_takes_the_newest_unfinished_run_of_the_name(cli, own, tmp_path):
    from slime_cli.resume import newest

    for number, status in ((0, "stopped"), (1, "running"), (9, "failed"), (10, "finished")):
        with RunDir.create("demo", at=tmp_path / "runs" / f"demo-{number}") as run_dir:
            run_dir.write_config("")
            run_dir.write_info({"status": status})
    with RunDir.create("demo-eval", at=tmp_path / "runs" / "demo-eval-11") as run_dir:
        run_dir.write_config("")
    cli("--version")
    assert newest("demo") == tmp_path / "runs" / "demo-9"
    assert newest("dem") is None
    assert newest("demo", tmp_path / "runs" / "demo-0") == tmp_path / "runs" / "demo-0"
    assert newest("demo", tmp_path / "elsewhere") is None


def test_auto_with_a_folder_of_its_own_starts_and_resumes_there(cli, own, whole, monkeypatch):
    monkeypatch.setenv("HALT", "main/4-0")
    assert cli("run", *own.flags, "--resume", "auto", "--run-dir", "here").code == 75
    monkeypatch.delenv("HALT")
    assert cli("run", *own.flags, "--resume", "auto", "--run-dir", "here").code == 0
    assert weights("here") == weights(whole)
    assert "already finished" in cli("run", *own.flags, "--resume", "auto", "--run-dir", "here").err


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_a_run_that_ended_before_its_first_sample_starts_there_and_says_so(cli, halted, whole, status):
    """Nothing was made, so nothing is lost: after a kill as after an end in order."""
    shutil.rmtree(halted / "checkpoints")
    for path in (*halted.glob("ledger.*"), *halted.glob("segments/*"), halted / "metrics.jsonl"):
        path.unlink()
    RunDir(halted).write_info({"status": status})
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert "it ended before its first sample; a fresh start at version 0" in done.err
    assert weights(halted) == weights(whole)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--force-key", "lr"), "nothing is resumed"),
        (("--resume", "x", "--run-dir", "y"), "both name the run directory"),
        (("--resume", "x", "--dry-run"), "slime show x"),
        (("--stop-after", "soon"), "write 40m"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(cli, words, part):
    done = cli("run", *words)
    assert done.code == 2
    assert part in done.err


def test_changed_keys_are_shown_and_unsafe_ones_refused(cli, halted, whole):
    before = (halted / "config.toml").read_bytes()
    done = cli("run", "--resume", halted, "--lr", "0.5", "--n-samples-per-prompt", "4", "--save-interval", "3")
    assert done.code == 2
    for part in ("error CFG13", "train.lr", "0.01 -> 0.5", "rollout.n_samples_per_prompt", "2 -> 4", "safe: figures"):
        assert part in done.err
    assert "--force-key rollout.n_samples_per_prompt --force-key train.lr" in done.err
    assert (halted / "config.toml").read_bytes() == before
    assert RunDir(halted).holder() is None
    assert cli("run", "--resume", halted).code == 0
    assert weights(halted) == weights(whole)


def test_safe_keys_pass_and_keep_the_weights(cli, halted, whole):
    """What does not train may change."""
    done = cli("run", "--resume", halted, "--save-interval", "1", "--rollout-slots", "3", "--name", "other")
    assert done.code == 0, done.err
    assert 'name                   "run" -> "other"' in done.err
    assert weights(halted) == weights(whole)
    assert 'name = "other"' in (halted / "config.toml").read_text()


def test_a_forced_key_goes_on_as_another_experiment(cli, halted, whole):
    """--force-key."""
    done = cli("run", "--resume", halted, "--lr", "0.5", "--force-key", "lr")
    assert done.code == 0, done.err
    assert "0.01 -> 0.5" in done.err
    assert weights(halted) != weights(whole)


def test_a_forced_key_that_changes_recorded_steps_is_not_held_against_the_record(cli, halted, whole):
    """Steps that were recorded under the old key are made again with the new one, from the same samples."""
    shutil.rmtree(halted / "checkpoints")
    done = cli("run", "--resume", halted, "--lr", "0.5", "--force-key", "lr")
    assert done.code == 0, done.err
    assert weights(halted) != weights(whole)
    assert history.states(RunDir(halted))["issued"] == 16


def test_another_split_of_the_same_mathematics_passes_with_a_notice(cli, halted):
    done = cli("run", "--resume", halted, "--max-tokens-per-gpu", "8")
    assert done.code == 0, done.err
    assert "notice: the same mathematics on another machine or in another split" in done.err


def test_a_changed_data_set_is_refused_with_both_fingerprints(cli, own, halted, whole):
    rows = (own.path / "my.jsonl").read_text()
    (own.path / "my.jsonl").write_text(rows.replace('"0+0="', '"0+9="'))
    done = cli("run", "--resume", halted)
    assert done.code == 3
    assert "error DAT29" in done.err
    assert len(set(re.findall(r"\b[0-9a-f]{12,64}\b", done.err))) >= 2, "what was saved and what is there"
    assert info(halted)["status"] == "failed"
    (own.path / "my.jsonl").write_text(rows)
    assert cli("run", "--resume", halted).code == 0
    assert weights(halted) == weights(whole)


def test_rows_that_were_appended_are_not_seen_by_the_run(cli, own, halted, whole):
    """The fingerprint pins the bytes that the run began with."""
    with (own.path / "my.jsonl").open("a") as file:
        file.write(json.dumps({"question": "9+9=", "answer": "18"}) + "\n")
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert weights(halted) == weights(whole)


def test_a_run_in_use_is_not_resumed(cli, halted):
    """Two processes never share a run."""
    with RunDir.reopen(halted):
        done = cli("run", "--resume", halted)
    assert done.code == 2
    assert "error CFG16" in done.err
    assert f"pid {os.getpid()}" in done.err


def test_show_tells_starts_checkpoints_and_where_a_resume_begins(cli, halted):
    facts = json.loads(cli("show", halted, "--json").out)
    assert facts["resume"] == {"version": 2, "from": "checkpoint", "command": f"slime run --resume {halted}"}
    assert [(row["version"], row["damage"]) for row in facts["checkpoints"]] == [(2, None)]
    assert cli("run", "--resume", halted).code == 0
    done = cli("show", halted)
    for part in ("starts", "stopped", "finished", "checkpoints", "whole", "all steps are done"):
        assert part in done.out
    facts = json.loads(cli("show", halted, "--json").out)
    starts = [(start["epoch"], start["from_version"], start["status"], start["version"]) for start in facts["starts"]]
    assert starts == [(1, 0, "stopped", 2), (2, 2, "finished", 4)]
    assert facts["resume"]["from"] == "finished"


@pytest.mark.parametrize(("gone", "origin"), [((), "checkpoint"), (("checkpoints",), "ledger")])
def test_show_names_the_ledger_and_damage(cli, halted, gone, origin):
    for name in gone:
        shutil.rmtree(halted / name)
    if not gone:
        (halted / "checkpoints" / "step-2" / "state.json").write_text("{")
        facts = json.loads(cli("show", halted, "--json").out)
        assert "is not what was written" in facts["checkpoints"][0]["damage"]
    facts = json.loads(cli("show", halted, "--json").out)
    assert facts["resume"]["from"] == "ledger"
    assert "from the ledger" in cli("show", halted).out


def test_verifying_a_step_that_is_done_is_refused(cli, halted):
    done = cli("run", "--resume", halted, "--verify-step", "2")
    assert done.code == 2
    assert "2 steps are done" in done.err
    assert RunDir(halted).holder() is None
