"""Whole runs of games by flags, with the embedded engine: what trains, and a run that is killed within an episode."""

import json
import signal
from pathlib import Path

import pytest
from recorded import steps_of

from slime_core.testing import tiny_model
from slime_core.testing.models import CHAT_TEMPLATE, VOCAB
from slime_core.testing.plugins import check_plugin

pytestmark = pytest.mark.system

FAULTY = Path(__file__).with_name("faulty_games.py")
GAMES = ("TicTacToe-v0", "GuessTheNumber-v0", "FrozenLake-v1")
RECIPE = """
plugins = ["gym"]
{tasks}
"""
TAMPER = """
def tamper(args, sample):
    sample.tokens[-1] = sample.tokens[-1] % 50 + 3
"""


@pytest.fixture
def train(forked_slime, tmp_path):
    tiny_model(tmp_path / "model", vocab=VOCAB + "[]|_<>", context_len=2048, chat_template=CHAT_TEMPLATE)
    tasks = "".join(f'[[data.tasks]]\nname = "{name}"\nplugin = "gym"\n' for name in GAMES)
    (tmp_path / "games.toml").write_text(RECIPE.format(tasks=tasks))
    (tmp_path / "tamper.py").write_text(TAMPER)

    def train(name, *flags, code=0):
        done = forked_slime(
            *("run", *flags, "--run-dir", name, "--hf-checkpoint", "model", "--apply-chat-template", "--lr", "1e-2"),
            *("--n-samples-per-prompt", "2", "--dtype", "float32", "--cpu-threads", "1"),
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        return tmp_path / name

    return train


def differences(run):
    """Of the trainer's log-probs from the engine's, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row.get("kind", "step") == "step"]
    return [metrics["train_rollout_logprob_abs_diff"] for metrics in steps]


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("gym") if finding.status in ("fail", "warn")] == []


def test_three_games_train_on_the_log_probs_that_the_trainer_has_too_and_a_tampered_token_shows(train):
    small = ("--rollout-batch-size", "4", "--rollout-max-response-len", "4")
    run = train("run", "games.toml", "--num-rollout", "2", *small)
    steps, counts = steps_of(run, 2)
    assert counts["issued"] == counts["trained"]
    assert {sample.task for step in steps for sample in step} == set(GAMES)
    assert max(differences(run)) < 1e-5
    for sample in (sample for step in steps for sample in step):
        assert sample.metadata["gym"]["game"] == sample.task
        assert sum(sample.loss_mask) < sample.response_length
    tampered = train(
        "tampered", "games.toml", "--num-rollout", "1", *small, "--rollout-sample-hook-path", "tamper.py:tamper"
    )
    assert max(differences(tampered)) > 1e-3


@pytest.mark.nightly
def test_a_run_that_is_killed_within_an_episode_ends_in_the_same_weights(train, forked_slime, tmp_path):
    flags = ("--plugin", "gym", "--game", "Faulty-v0", "--modules", FAULTY, "--rollout-max-response-len", "2")
    flags += ("--rollout-batch-size", "2", "--num-rollout", "2", "--no-colocate", "--max-staleness", "1")
    (tmp_path / "moves").write_text("." * 100)
    folder = f'{{"folder": "{tmp_path}"}}'
    whole = train("whole", *flags, "--game-args", folder)
    (tmp_path / "moves").write_text("")
    killed = train("killed", *flags, "--game-args", folder, code=-signal.SIGKILL)
    assert (tmp_path / "moves").stat().st_size >= 40
    resumed = forked_slime("run", "--resume", killed, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert weights[0] == weights[1]
