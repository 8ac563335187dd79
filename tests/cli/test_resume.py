"""`slime run --resume`: runs that were stopped go on to the same weights, and nothing is started again in silence."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from slime_cli.failure import Session
from slime_cli.main import main
from slime_cli.resume import evaluations_kept, load_saved
from slime_core import failpoints
from slime_core.checkpoint import Found
from slime_core.config.redact import REDACTED
from slime_core.report import RunDir, history

pytestmark = pytest.mark.integration

KEEPING = """
import slime_core

class Kept:
    told = 0
    def state(self):
        return {{"told": self.told}}
    def load(self, state):
        {load}

kept = Kept()

@slime_core.hookimpl
def slime_state():
    return kept

@slime_core.hookimpl
def slime_step_done(report, ctx):
    kept.told += 1
    print("told", kept.told)
"""
OPTIONS = """
import pydantic
import slime_core

class Options(pydantic.BaseModel):
    api_key: str = ""
    endpoint: str = ""

@slime_core.hookimpl
def slime_options():
    return Options

@slime_core.hookimpl
def slime_step_done(report, ctx):
    assert ctx.options.api_key == "correct-horse"
"""


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
    found = Found(path=Path("x"), version=4, epoch=1, state=state, config={}, plugins="", machine={})
    assert evaluations_kept(found) == kept
    assert evaluations_kept(None) == 0


def test_more_steps_go_on_from_the_end_of_a_finished_run(cli, own, whole):
    """Case 107, the other way round: num_rollout raised."""
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
    """Case 107: exit 0, and nothing is touched."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    done = cli("run", "--resume", whole, *steps, "--json")
    assert done.code == 0
    assert "already finished: 4 steps are done" in done.err
    assert json.loads(done.out)["version"] == 4
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_fewer_steps_than_are_done_end_a_stopped_run(cli, halted):
    """Case 107: lowered below what is done, nothing trains any more; the model is written."""
    done = cli("run", "--resume", halted, "--num-rollout", "1")
    assert done.code == 0, done.err
    assert info(halted)["version"] == 2
    assert (halted / "final" / "model.safetensors").exists()
    assert [row["version"] for row in figures(halted) if row["kind"] == "step"] == [1, 2]


def test_without_a_checkpoint_it_starts_again_from_the_ledger_and_says_so(cli, halted, whole):
    """Case 14: what was recorded is not sampled again."""
    shutil.rmtree(halted / "checkpoints")
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert "there is no checkpoint. It starts again at version 0 FROM THE LEDGER" in done.err
    assert "2 recorded steps" in done.err
    assert weights(halted) == weights(whole)
    assert history.states(RunDir(halted))["issued"] == 16


def test_without_checkpoint_and_samples_there_is_nothing_to_resume(cli, halted):
    """Case 14: never a silent fresh start."""
    shutil.rmtree(halted / "checkpoints")
    for path in halted.glob("ledger.sqlite*"):
        path.unlink()
    done = cli("run", "--resume", halted)
    assert done.code == 2
    assert "error CFG14" in done.err
    assert "--resume auto" in done.err
    assert not list((halted / "checkpoints").iterdir())
    assert RunDir(halted).holder() is None
    again = cli("run", "--resume", "auto", "--run-dir", halted)
    assert again.code == 2, "figures say that steps were made"


def test_a_checkpoint_without_its_ledger_is_refused(cli, halted):
    """Nothing is lost in silence: the samples that trained are part of the run."""
    for path in halted.glob("ledger.*"):
        path.unlink()
    done = cli("run", "--resume", halted)
    assert done.code == 7
    assert "error STO117" in done.err
    assert "the ledger holds 0 samples" in done.err
    assert not list(halted.glob("ledger.*"))


def test_what_is_no_run_cannot_be_resumed(cli, tmp_path):
    done = cli("run", "--resume", tmp_path)
    assert done.code == 2
    assert "error CFG05" in done.err


def test_auto_says_that_it_starts_afresh_and_later_what_it_resumes(cli, own, whole, monkeypatch):
    """Case 14: `--resume auto` is explicit both ways."""
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

    for number, status in ((0, "preempted"), (1, "running"), (9, "failed"), (10, "finished")):
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


@pytest.mark.parametrize("status", ["running", "preempted"])
def test_a_run_that_ended_before_its_first_sample_starts_there_and_says_so(cli, own, halted, whole, status):
    """Nothing was made, so nothing is lost: after an end in order, or where `auto` was asked."""
    shutil.rmtree(halted / "checkpoints")
    for path in (*halted.glob("ledger.*"), *halted.glob("segments/*"), halted / "metrics.jsonl"):
        path.unlink()
    RunDir(halted).write_info({"status": status})
    plain = status == "preempted"
    done = cli("run", *(("--resume", halted) if plain else (*own.flags, "--resume", "auto", "--run-dir", halted)))
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
    """Case 13."""
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
    """Case 13: what does not train may change."""
    done = cli("run", "--resume", halted, "--save-interval", "1", "--rollout-slots", "3", "--name", "other")
    assert done.code == 0, done.err
    assert 'name                   "run" -> "other"' in done.err
    assert weights(halted) == weights(whole)
    assert 'name = "other"' in (halted / "config.toml").read_text()


def test_a_forced_key_goes_on_as_another_experiment(cli, halted, whole):
    """Case 13: --force-key."""
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
    """Case 29."""
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
    """Case 38: the fingerprint pins the bytes that the run began with."""
    with (own.path / "my.jsonl").open("a") as file:
        file.write(json.dumps({"question": "9+9=", "answer": "18"}) + "\n")
    done = cli("run", "--resume", halted)
    assert done.code == 0, done.err
    assert weights(halted) == weights(whole)


def test_an_edited_function_is_refused_unless_forced(cli, own, halted):
    """Case 65, for a function by path."""
    with (own.path / "judge.py").open("a") as file:
        file.write("\n# better\n")
    done = cli("run", "--resume", halted)
    assert done.code == 4
    assert "error PLG65" in done.err
    assert f"{own.path}/judge.py: its source files changed" in done.err
    assert "--force-key plugins" in done.err
    forced = cli("run", "--resume", halted, "--force-key", "plugins")
    assert forced.code == 0, forced.err
    assert "its source files changed" in forced.err


def upgrade(site, load):
    """Another version of the plugin in its place, as pip would put it."""
    (site / "keeping_plugin_module.py").write_text(KEEPING.format(load=load))
    (site / "dist_keeping-1.0.dist-info").rename(site / "dist_keeping-2.0.dist-info")
    metadata = site / "dist_keeping-2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))


def forget_module():
    import sys

    sys.modules.pop("keeping_plugin_module", None)


@pytest.fixture
def kept(cli, own, install_plugin, monkeypatch):
    """A run with a plugin that keeps state, stopped at version 2; and where the plugin lies."""
    site = install_plugin("keeping", KEEPING.format(load="self.told = state['told']"))
    monkeypatch.setenv("HALT", "main/4-0")
    done = cli("run", *own.flags, "--plugin", "keeping", "--run-dir", "cut")
    assert (done.code, done.out) == (75, "told 1\ntold 2\n"), done.err
    monkeypatch.delenv("HALT")
    forget_module()
    return Path("cut").absolute(), site


def test_a_plugins_state_comes_back(cli, kept):
    path, _ = kept
    done = cli("run", "--resume", path)
    assert (done.code, done.out) == (0, f"told 3\ntold 4\n{path}\n"), done.err


def test_an_upgraded_plugin_is_refused_with_both_versions_and_migrates_when_forced(cli, kept):
    """Case 65: `load` gets what the old version saved."""
    path, site = kept
    upgrade(site, "self.told = 100 * state['told']")
    done = cli("run", "--resume", path)
    assert done.code == 4
    assert "error PLG65" in done.err
    assert "plugin keeping: dist-keeping==1.0 was saved, dist-keeping==2.0 is installed" in done.err
    forget_module()
    forced = cli("run", "--resume", path, "--force-key", "plugins")
    assert (forced.code, forced.out) == (0, f"told 201\ntold 202\n{path}\n"), forced.err
    assert info(path)["plugins"] == {"keeping": "dist-keeping==2.0"}


def test_a_removed_plugin_is_refused_by_name(cli, kept):
    """Case 65: a plugin that is gone."""
    path, site = kept
    shutil.rmtree(site / "dist_keeping-1.0.dist-info")
    done = cli("run", "--resume", path)
    assert done.code == 4
    assert "error PLG51" in done.err
    assert "keeping" in done.err


def test_a_run_in_use_is_not_resumed(cli, halted):
    """Case 16: two processes never share a run."""
    with RunDir.reopen(halted):
        done = cli("run", "--resume", halted)
    assert done.code == 2
    assert "error CFG16" in done.err
    assert f"pid {os.getpid()}" in done.err


def test_a_secret_must_come_back_by_flag_or_variable(cli, own, install_plugin, monkeypatch):
    """Secrets are redacted in config.toml, so a resume needs them again."""
    install_plugin("keyed", OPTIONS)
    monkeypatch.setenv("HALT", "main/4-0")
    flags = ("--plugin", "keyed", "--run-dir", "cut")
    assert cli("run", *own.flags, *flags, "plugin.keyed.api_key=correct-horse").code == 75
    monkeypatch.delenv("HALT")
    assert "correct-horse" not in Path("cut/config.toml").read_text() + Path("cut/run.json").read_text()
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "error CFG09" in done.err
    assert "plugin.keyed.api_key" in done.err
    wrong = cli("run", "--resume", "cut", "plugin.keyed.api_key=other")
    assert wrong.code == 4, "the plugin sees the key that was given"
    again = cli("run", "--resume", "cut", "plugin.keyed.api_key=correct-horse")
    assert again.code == 0, again.err


def test_a_secret_from_a_variable_is_read_from_it_again(cli, own, install_plugin, monkeypatch, tmp_path):
    install_plugin("keyed", OPTIONS)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('plugins = ["keyed"]\n[plugin.keyed]\napi_key = "${MY_API_KEY}"\nendpoint = "${HIDDEN_TOKEN}"\n')
    monkeypatch.setenv("HALT", "main/4-0")
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    monkeypatch.setenv("HIDDEN_TOKEN", "battery-staple")
    assert cli("run", recipe, *own.flags, "--run-dir", "cut").code == 75
    monkeypatch.delenv("HALT")
    names = {"plugin.keyed.api_key": "${MY_API_KEY}", "plugin.keyed.endpoint": "${HIDDEN_TOKEN}"}
    assert info("cut")["references"] == names
    monkeypatch.delenv("MY_API_KEY")
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "export MY_API_KEY=..." in done.err
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    again = cli("run", "--resume", "cut")
    assert again.code == 0, again.err
    assert "CFG10" not in again.err
    everything = "".join(
        p.read_text(errors="replace")
        for p in Path("cut").rglob("*")
        if p.suffix in (".toml", ".json", ".jsonl", ".txt")
    )
    assert "correct-horse" not in everything
    assert "battery-staple" not in everything, "not in MANIFEST.json either"
    assert REDACTED in Path("cut/config.toml").read_text()


@pytest.mark.parametrize("secret", ["correct-horse", "1e5", "007", 'a "quoted" $one'])
def test_a_secret_of_servers_comes_back_from_the_variable_of_its_name(cli, own, monkeypatch, secret):
    """[sglang.env] of a run is for other processes, and never written down."""
    monkeypatch.setenv("HALT", "main/4-0")
    word = f"sglang.env.HF_TOKEN={json.dumps(secret)}"
    assert cli("run", *own.flags, "--run-dir", "cut", word, "sglang.env.PLAIN=2").code == 75
    monkeypatch.delenv("HALT")
    assert secret not in Path("cut/config.toml").read_text() + Path("cut/run.json").read_text()
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "error CFG09" in done.err
    assert "sglang.env.HF_TOKEN" in done.err
    assert "export HF_TOKEN=..." in done.err
    monkeypatch.setenv("HF_TOKEN", secret)
    settings = load_saved(Path("cut"), [], Session(argv=["run", "--resume", "cut"]))
    assert settings.config.sglang["env"] == {"HF_TOKEN": secret, "PLAIN": 2}
    assert secret in settings.loaded.secrets
    if secret == "correct-horse":
        again = cli("run", "--resume", "cut")
        assert again.code == 0, again.err
        assert secret not in "".join(p.read_text() for p in Path("cut").rglob("*") if p.suffix in (".toml", ".json"))


def test_show_tells_starts_checkpoints_and_where_a_resume_begins(cli, halted):
    facts = json.loads(cli("show", halted, "--json").out)
    assert facts["resume"] == {"version": 2, "from": "checkpoint", "command": f"slime run --resume {halted}"}
    assert [(row["version"], row["damage"]) for row in facts["checkpoints"]] == [(2, None)]
    assert cli("run", "--resume", halted).code == 0
    done = cli("show", halted)
    for part in ("starts", "preempted", "finished", "checkpoints", "whole", "all steps are done"):
        assert part in done.out
    facts = json.loads(cli("show", halted, "--json").out)
    starts = [(start["epoch"], start["from_version"], start["status"], start["version"]) for start in facts["starts"]]
    assert starts == [(1, 0, "preempted", 2), (2, 2, "finished", 4)]
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
