"""Bad configurations on the command line: code, where and fix on stderr, exit code 2, no traceback, nothing made."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

CASES = {  # recipe, flags, first code, places, fixes
    "keys and values": (
        "[train]\nlr = -1.0\nlerning_rate = 1.0\n",
        ["--num-rollout", "many"],
        ("CFG01", "CFG02", "CFG03"),
        ("recipe.toml:2", "recipe.toml:3", "command line: --num-rollout"),
        ("set train.lr to a number >= 0", "slime config keys train", "give an integer"),
    ),
    "rules": (
        "[rollout]\nrollout_temperature = 0\n[train]\nglobal_batch_size = 7\n",
        [],
        ("CFG03", "CFG04"),
        ("recipe.toml:2", "recipe.toml:4"),
        ("set rollout_temperature above 0", "such as 4"),
    ),
    "text": ("[train\n", [], ("CFG06",), ("recipe.toml:1:",), ("tables a header",)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("config", "check")], ids=" ".join)
def test_a_bad_configuration_ends_with_every_problem_its_place_and_fix(cli, tmp_path, command, case):
    text, flags, codes, places, fixes = CASES[case]
    (tmp_path / "recipe.toml").write_text(text)
    done = cli(*command, "recipe.toml", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error CFG")
    assert [part for part in (*codes, *places, *fixes) if part not in done.err] == []
    assert "Traceback" not in done.err
    assert os.listdir(tmp_path) == ["recipe.toml"]


def test_a_bad_config_gives_the_same_error_through_a_process_and_as_json(slime, tmp_path):
    (tmp_path / "recipe.toml").write_text("[train]\nlrr = 1.0\n")
    done = slime("run", "recipe.toml", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["where"], error["exit_code"]) == ("CFG01", "recipe.toml:2", 2)
    assert "train.lr" in error["fix"]


def test_a_pasted_secret_is_warned_about_and_never_shown(cli, tmp_path):
    (tmp_path / "recipe.toml").write_text('[sglang]\napi_key = "canary-1234567"\n')
    shown = cli("config", "show", "recipe.toml")
    assert shown.code == 0
    assert "warning CFG10: sglang.api_key looks like a secret (recipe.toml:2)" in shown.err
    assert 'api_key = "[redacted]"' in shown.out
    assert "canary-1234567" not in shown.out + shown.err
    bad = cli("config", "check", "recipe.toml", "--lr", "hf_abcdefghijklmnopqrstuvwxyz")
    assert "hf_abc" not in bad.out + bad.err


def test_a_folder_with_another_run_is_refused(cli, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text("")
    (tmp_path / "model").mkdir()
    done = cli("run", "--dry-run", "--run-dir", "old", "--hf-checkpoint", "model", "--prompt-data", "hub/rows")
    assert done.code == 2
    assert "error CFG12" in done.err
    assert f"where: {tmp_path}/old" in done.err
    assert f"--run-dir {tmp_path}/old-2" in done.err


def test_a_folder_where_a_process_runs_is_refused_with_its_pid(cli, tmp_path):
    code = (
        "import sys; from pathlib import Path; from slime_core.report.rundir import RunDir\n"
        "r = RunDir.create('x', at=Path(sys.argv[1])); print('up', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "busy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "up\n"
        (tmp_path / "model").mkdir()
        done = cli("run", "--dry-run", "--run-dir", "busy", "--hf-checkpoint", "model", "--prompt-data", "hub/rows")
    finally:
        holder.communicate()
    assert done.code == 2
    assert "error CFG16" in done.err
    assert f"pid {holder.pid} on {os.uname().nodename}" in done.err


def test_a_run_without_anything_names_what_is_missing(cli):
    done = cli("run")
    assert done.code == 2
    assert "--hf-checkpoint DIR" in done.err
    assert "--prompt-data FILE.jsonl" in done.err


def test_a_recipe_that_does_not_exist_names_the_folder(cli, tmp_path):
    done = cli("run", "no-such.toml")
    assert done.code == 2
    assert "error CFG05" in done.err
    assert f"{tmp_path}/no-such.toml" in done.err


@pytest.mark.parametrize("recipe", ["warmup", "./warmup"])
def test_a_word_that_is_no_recipe_explains_what_can_be(cli, recipe):
    done = cli("run", recipe)
    assert done.code == 2
    assert "error CFG05" in done.err
    assert "PLUGIN/RECIPE" in done.err


def test_a_plugins_recipe_that_does_not_exist_names_those_that_do(cli):
    done = cli("run", "rm_math/nightly")
    assert done.code == 2
    assert "it has: default" in done.err


def test_a_plugin_that_is_not_installed_is_answered_with_the_nearest(cli):
    done = cli("run", "--plugin", "rm_mth")
    assert done.code == 4
    assert "error PLG51" in done.err
    assert "did you mean 'rm_math'?" in done.err


def test_a_second_recipe_is_refused(cli):
    done = cli("run", "a.toml", "b.toml")
    assert done.code == 2
    assert "unexpected argument 'b.toml'" in done.err


def test_a_wrong_path_gets_the_nearest_name_beside_it(cli, tmp_path):
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "model").mkdir()
    done = cli("config", "check", "--prompt-data", "trian.jsonl", "--hf-checkpoint", "./modle/last")
    assert "did you mean 'train.jsonl'?" in done.err
    assert "did you mean 'model'?" in done.err


@pytest.mark.parametrize(
    "words",
    [("config", "keys", "vllm"), ("config", "check", "--vllm-port", "8"), ("config", "check", "recipe.toml")],
    ids=["keys", "flag", "recipe"],
)
def test_what_slime_does_not_have_is_said_and_no_other_key_is_named(cli, tmp_path, words):
    (tmp_path / "recipe.toml").write_text("[train]\nvllm = true\n")
    done = cli(*words)
    assert done.code == 2
    assert "vLLM is not supported" in done.err
    assert "did you mean" not in done.err
