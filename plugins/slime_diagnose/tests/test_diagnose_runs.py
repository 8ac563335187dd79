"""Small runs, each broken in one way, and what `slime diagnose` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system
REWARDS = """
def varied(args, sample, **kwargs):
    return sum(place * ord(char) for place, char in enumerate(sample.response, 1)) % 101 / 101

def nothing(args, sample, **kwargs):
    return 0.0

def by_prompt(args, sample, **kwargs):
    return float(sample.prompt[0] in "02")

def length(args, sample, **kwargs):
    return sample.response_length / 32
"""
HOOKS = {
    "cancel": """
import slime_core

@slime_core.hookimpl
def slime_batch(batch, ctx):
    batch.columns["advantages"][:] = 0
""",
    "mask": """
import slime_core

@slime_core.hookimpl
def slime_sample_done(sample, ctx):
    sample.remove_sample = True
""",
    "pick": """
import slime_core

@slime_core.hookimpl
def slime_filter(group, ctx):
    return slime_core.Drop(reason="not_a_third") if group.prompt.position % 3 else None
""",
}
STOPS = json.dumps(list(range(20, 40)))
RUNS: dict[str, tuple[str, list[str], set[str]]] = {
    "no reward": ("nothing", [], {"grader-never-matches"}),
    "a rate that bfloat16 loses": (
        *("varied", ["--lr", "1e-12", "--dtype", "bfloat16", "--lr-warmup-iters", "9"]),
        {"lr-too-small", "warmup-too-long"},
    ),
    "no rate": ("varied", ["--lr", "0"], {"lr-zero"}),
    "advantages of 0": ("varied", ["--plugin", "./cancel.py"], {"advantages-cancelled"}),
    "a mask of 0": ("varied", ["--plugin", "./mask.py"], {"all-masked"}),
    "dropped groups": ("varied", ["--plugin", "./pick.py"], {"samples-dropped"}),
    "rewards of prompts": ("by_prompt", [], {"groups-equal"}),
    "a rate that breaks the policy": (
        *("varied", ["--lr", "0.3", "--num-steps-per-rollout", "4", "--kl-loss-coef", "1e-4"]),
        {"ratio-explodes", "kl-explodes"},
    ),
    "a nucleus": ("varied", ["--rollout-top-p", "0.5"], {"engine-gap"}),
    "a length that pays": (
        *(
            "length",
            [
                "--num-rollout",
                "24",
                "--lr",
                "3e-3",
                "--rollout-max-response-len",
                "32",
                "--rollout-stop-token-ids",
                STOPS,
            ],
        ),
        {"length-pays"},
    ),
    "no end": ("varied", ["--rollout-max-response-len", "1"], {"never-stops"}),
}


@pytest.fixture
def run(own: Any, forked_slime: Any) -> Any:
    """Run six steps on sums with a reward of ours; the answer is the run directory and what the run said."""
    (own.path / "rewards.py").write_text(REWARDS)
    for name, source in HOOKS.items():
        (own.path / f"{name}.py").write_text(source)

    def go(reward: str, *flags: str) -> tuple[Path, str]:
        words = [*own.flags, "--custom-rm-path", f"rewards.py:{reward}", "--num-rollout", "6", "--save-interval", "0"]
        words += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-export-final", *flags]
        done = forked_slime("run", *words, "--run-dir", own.path / "run", cwd=own.path)
        assert done.returncode == 0, done.stderr
        return own.path / "run", done.stderr

    return go


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_a_fault_is_diagnosed(name: str, run: Any, cli: Any) -> None:
    reward, flags, expected = RUNS[name]
    folder, _ = run(reward, *flags)
    answer = cli("diagnose", folder, "--json")
    assert answer.code == 0
    findings = {finding["rule"] for finding in json.loads(answer.out)}
    findings -= {"truncated"}  # a model from a seed hardly ends a response
    if name == "a rate that breaks the policy":
        findings -= {"never-stops", "one-answer-pays"}  # what is left of it depends on the last bit
    assert findings == expected


def test_findings_are_noted_while_a_run_trains_and_shown_afterwards(run: Any, cli: Any) -> None:
    folder, said = run("nothing", "--plugin", "diagnose", "--interval", "2")
    log = (folder / "log" / "run.log").read_text()
    for text in (said, log):
        assert text.count("critical: grader-never-matches") == 1
    assert "label" in log
    shown = cli("show", folder).out
    assert "grader-never-matches" in shown
    assert "label_key" in shown or "rollout_max_response_len" in shown
    assert cli("diagnose", folder, "--fail-on", "critical").code == 1
    assert json.loads(cli("show", folder, "--json").out)["diagnosis"][0]["severity"] == "critical"


def test_what_holds_no_run_or_no_step_is_said(tmp_path: Path, cli: Any) -> None:
    assert "CFG05" in cli("diagnose", tmp_path).err
    (tmp_path / "config.toml").write_text('name = "none"\n')
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "version": 1, "sta')
    answer = cli("diagnose", tmp_path, "--fail-on", "note")
    assert (answer.code, answer.out) == (0, "nothing stands out\n")
