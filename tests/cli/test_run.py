"""`slime run`, `slime show` and `slime eval` on the embedded engine and trainer, through the real command."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from slime_core.report import RunDir

pytestmark = pytest.mark.integration

SMALL = (
    *("--plugin", "rm_math", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--cpu-threads", "1"),
    *("--heldout-rows", "6", "--rollout-slots", "auto", "--num-rollout", "2", "stage.warmup.num_rollout=1"),
)


@pytest.fixture(scope="module")
def finished(zygote, tmp_path_factory):
    """One small finished run: its folder, and what the process said."""
    cwd = tmp_path_factory.mktemp("finished")
    done = zygote.slime(tmp_path_factory.mktemp("said"), "run", *SMALL, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "arithmetic-0", done


def test_the_run_directory_is_named_first_and_last_and_alone_on_stdout(finished):
    path, done = finished
    assert done.stdout == f"{path}\n"
    talk = done.stderr.splitlines()
    assert talk[0] == f"run {path}"
    assert talk[-1] == f"look  slime show {path}"
    assert f"model {path / 'final'}" in talk


def test_elsewhere_than_a_terminal_there_is_one_line_a_step(finished):
    lines = [line for line in finished[1].stderr.splitlines() if re.match(r"\w+ step \d+/\d+  ", line)]
    assert [line.split("  ")[0] for line in lines] == ["warmup step 1/1", "grpo step 1/2", "grpo step 2/2"]
    assert all(re.search(r"tok/s \d+  eta \d", line) for line in lines)
    assert "\x1b" not in finished[1].stderr


def test_the_directory_holds_everything_that_is_documented(finished):
    path, _ = finished
    names = {item.name for item in path.iterdir()}
    assert names >= {
        *("config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "ledger.sqlite", "segments", "log", "errors"),
        *("checkpoints", "final", "lock"),
    }
    config = tomllib.loads((path / "config.toml").read_text())
    assert config["rollout"]["rollout_batch_size"] == 4
    assert config["rollout"]["rollout_slots"] == 64
    assert "auto: 64 sequences at once (as on any processor)" in finished[1].stderr
    assert config["cluster"]["cpu_threads"] == 1
    assert [stage["name"] for stage in config["stage"]] == ["warmup", "grpo"]
    info = json.loads((path / "run.json").read_text())
    assert (info["status"], info["version"], info["command"][:2]) == ("finished", 3, ["slime", "run"])
    assert list((path / "errors").iterdir()) == []
    assert [(start["status"], start["version"], start["epoch"]) for start in info["starts"]] == [("finished", 3, 1)]


def test_show_explains_the_run(finished, cli):
    path, _ = finished
    done = cli("show", path)
    assert (done.code, done.err) == (0, "")
    for part in (
        "finished",
        "warmup",
        "grpo",
        "reward/mean",
        "arithmetic_heldout",
        "rm_math (slime-rm-math",
        "best sample",
    ):
        assert part in done.out
    assert f"final model  {path}/final" in done.out


def test_show_as_json_has_stable_keys_and_adds_up(finished, cli):
    path, _ = finished
    facts = json.loads(cli("show", path, "--json").out)
    assert set(facts) == {
        *("run_dir", "status", "holder", "info", "config", "version", "stages", "samples_by_state", "evaluations"),
        *("routing", "samples", "errors", "final", "starts", "checkpoints", "resume", "diagnosis"),
    }
    assert (facts["status"], facts["version"], facts["holder"]) == ("finished", 3, None)
    assert [(stage["name"], stage["steps"], stage["of"]) for stage in facts["stages"]] == [
        ("warmup", 1, 1),
        ("grpo", 2, 2),
    ]
    states = facts["samples_by_state"]
    dropped = sum(count for name, count in states.items() if name.startswith("dropped/"))
    assert states["issued"] == states["trained"] + states["pending"] + dropped
    assert {(row["name"], row["version"]) for row in facts["evaluations"]} == {
        ("arithmetic_heldout", 1),
        ("arithmetic_heldout", 3),
    }
    assert {row["rank"] for row in facts["samples"]} == {"best", "worst"}


def test_the_runs_config_runs_again_as_a_recipe(finished, cli):
    assert cli("config", "check", finished[0] / "config.toml").code == 0


def test_a_run_is_never_written_over(finished, cli):
    path, _ = finished
    before = (path / "metrics.jsonl").read_bytes()
    done = cli("run", *SMALL, "--run-dir", path)
    assert done.code == 2
    assert "error CFG12" in done.err
    assert (path / "metrics.jsonl").read_bytes() == before


def test_eval_of_a_run_uses_its_own_config(finished, cli):
    path, _ = finished
    done = cli("eval", path, "--heldout-rows", "5", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["evaluations"]["arithmetic_heldout"]["samples"] == 5.0
    saved = [json.loads(line) for line in (Path(answer["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["name"]) for row in saved] == [("eval", "arithmetic_heldout")]


def test_eval_of_a_model_folder_needs_a_set(finished, cli):
    done = cli("eval", finished[0] / "final")
    assert done.code == 2
    assert "there is nothing to evaluate" in done.err
    assert "--eval-prompt-data NAME FILE.jsonl" in done.err


def test_eval_of_a_model_folder_takes_a_config(finished, cli):
    done = cli("eval", finished[0] / "final", finished[0] / "config.toml", "--heldout-rows", "5")
    assert done.code == 0, done.err
    assert "arithmetic_heldout" in done.out


def test_eval_of_a_run_that_has_not_ended_says_so(cli, tmp_path):
    with RunDir.create("x", at=tmp_path / "run") as run_dir:
        run_dir.config.write_text("")
    done = cli("eval", "run")
    assert done.code == 2
    assert "has no final model" in done.err


def test_eval_without_a_model_says_what_it_takes(cli):
    done = cli("eval", "--heldout-rows", "5")
    assert done.code == 2
    assert "MODEL" in done.err


def test_a_dry_run_checks_and_plans_and_makes_nothing(cli, tmp_path):
    done = cli("run", *SMALL, "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["run_dir"] == f"{tmp_path}/runs/arithmetic-0"
    warmup, grpo = plan["stages"]
    assert (warmup["steps"], warmup["rollouts_per_step"], grpo["steps"], grpo["rollouts_per_step"]) == (1, 8, 2, 8)
    assert grpo["max_response_tokens_per_step"] == 8 * 6
    assert grpo["first_row"]["label"].lstrip("-").isdigit()
    assert grpo["eval_sets"] == [{"name": "arithmetic_heldout", "prompts": 6}]
    assert {"hook", "task", "provider"} <= set(plan["routing"][0])
    assert os.listdir(tmp_path) == []


def test_a_dry_run_meets_what_the_run_would_meet(cli, tmp_path):
    (tmp_path / "model").mkdir()
    done = cli("run", "--dry-run", "--hf-checkpoint", "model", "--prompt-data", "hub/rows")
    assert done.code == 3
    assert "config.json" in done.err
    assert os.listdir(tmp_path) == ["model"]


def test_a_plan_can_be_read(cli):
    done = cli("run", *SMALL, "--dry-run")
    assert done.code == 0
    for part in ("plan (nothing was started)", "run directory", "first row of grpo", "routing", "slime_reward"):
        assert part in done.out


def test_a_failing_reward_ends_with_its_place_and_keeps_the_traceback(cli, tmp_path):
    (tmp_path / "reward.py").write_text("async def fn(args, sample, **kw):\n    return {}['gone']\n")
    done = cli("run", *SMALL, "stage.grpo.custom_rm_path=reward.py:fn", "--run-dir", "out")
    assert done.code == 4
    assert "reward.py" in done.err
    assert "Traceback" not in done.err
    saved = tmp_path / "out" / "errors" / "traceback.txt"
    assert str(saved) in done.err
    assert "KeyError" in saved.read_text()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"
