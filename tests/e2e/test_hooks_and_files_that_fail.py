"""Real runs whose reward hangs or ends the process, or whose data or folder goes away: exit codes, and resumes."""

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from functools import partial

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.system

REWARD = '''
import os
import shutil
import sys
from pathlib import Path

from slime_core.plugins.boundary import HOOK_LOOP

HERE = Path(__file__).parent
count = 0

def full(figures):
    """Let no line be written to the file any more, through its open descriptor or by its name."""
    opened = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath("/proc/self/fd/" + fd) == str(figures)]
    figures.rename(HERE / "away")
    figures.symlink_to("/dev/full")
    for fd in opened:
        os.dup2(os.open("/dev/full", os.O_WRONLY), int(fd))

def wipe(folder):
    """Remove a folder into which other threads of the run go on to write."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)

def reward(args, sample, **kwargs):
    """Digits in the response; the {nth}th call does harm, in the first process alone."""
    global count
    count += 1
    if count == {nth} and not (HERE / "harmed").exists():
        (HERE / "harmed").touch()
        {harm}
    return float(sum(char.isdigit() for char in sample.response))
'''
HARM = {
    "none": "pass",
    "ends": "os._exit(0)",
    "moves": "os.chdir('/')",
    "leaves": "HOOK_LOOP.get().call_soon_threadsafe(sys.exit, 0)",
    "fills": "full(HERE / 'run' / 'metrics.jsonl')",
    "wipes": "wipe(HERE / 'run')",
    "removes": "(HERE / 'my.jsonl').rename(HERE / 'away')",
    "cuts": "(HERE / 'away').write_bytes((HERE / 'my.jsonl').read_bytes()); os.truncate(HERE / 'my.jsonl', 100)",
}
HANGS = """
def reward(args, sample, **kwargs):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
"""


def alone(*args, cwd):
    """`slime ARGS` in a folder, as a user starts it: how the process exits is its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
    program = [sys.executable, "-m", "slime_cli.main", *map(str, args)]
    return subprocess.run(program, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def train(tmp_path_factory, zygote):
    """Run in a folder of its own with the data and a reward: twelve rollouts in three steps."""
    forked = partial(zygote.slime, tmp_path_factory.mktemp("said"))
    model = tiny_model(tmp_path_factory.mktemp("model") / "model")
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(5)]

    def run(source, *flags, slime=forked):
        cwd = tmp_path_factory.mktemp("run")
        (cwd / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (cwd / "my_reward.py").write_text(source)
        done = slime(
            *("run", "--hf-checkpoint", model, "--prompt-data", "my.jsonl", "--custom-rm-path", "my_reward.py:reward"),
            *("--num-rollout", "3", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--lr", "1e-3"),
            *("--rollout-max-response-len", "4", "--save-interval", "1", "--cpu-threads", "1", "--seed", "3"),
            *("--rollout-shuffle", "--label-key", "label", "--skip-eval-before-train", "--run-dir", "run"),
            *flags,
            cwd=cwd,
        )
        return cwd, done

    return run


@pytest.fixture(scope="module")
def whole(train):
    """The folder of a run to which nothing happened."""
    cwd, done = train(REWARD.format(harm=HARM["none"], nth=6))
    assert done.returncode == 0, done.stderr
    return cwd


def weights(cwd):
    return hashlib.sha256((cwd / "run" / "final" / "model.safetensors").read_bytes()).hexdigest()


def figures(cwd):
    rows = map(json.loads, (cwd / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["version"] for row in rows if row["kind"] == "step"]


def states(cwd):
    with sqlite3.connect(cwd / "run" / "ledger.sqlite") as db:
        return dict(db.execute("SELECT state, count(*) FROM samples GROUP BY state"))


@pytest.mark.nightly
def test_a_reward_that_cannot_be_ended_ends_the_run_with_its_stack_and_the_process_exits(train):
    """Whatever the policy, in a real process."""
    cwd, done = train(HANGS, "--reward-timeout", "1", "--on-plugin-error", "drop", slime=alone)
    assert done.returncode == 4, done.stderr
    assert "error PLG60  custom_rm_path.slime_reward did not answer in 1 s for prompt 'main/" in done.stderr
    assert "in reward" in done.stderr
    assert "my_reward.py" in done.stderr
    assert json.loads((cwd / "run" / "run.json").read_text())["error"] == "PLG60"


@pytest.mark.parametrize(
    ("harm", "code", "told", "place"),
    [
        ("removes", 3, "error DAT37  my.jsonl is gone", "my.jsonl"),
        pytest.param("cuts", 3, "error DAT37  my.jsonl was cut short", "my.jsonl", marks=pytest.mark.nightly),
        pytest.param("ends", 4, "error PLG62  custom_rm_path.slime_reward failed", "", marks=pytest.mark.nightly),
        pytest.param("leaves", 4, "error PLG62  code that is not the run's own", "", marks=pytest.mark.nightly),
        ("fills", 7, "error STO109  metrics.jsonl cannot be written", "run/metrics.jsonl"),
    ],
)
def test_a_run_goes_on_to_the_same_weights_when_its_file_is_back_or_its_reward_spares_it(
    forked_slime, train, whole, harm, code, told, place
):
    """Nothing is lost or done twice."""
    cwd, done = train(REWARD.format(harm=HARM[harm], nth=6))
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    if place:
        (cwd / "away").rename(cwd / place)
    again = forked_slime("run", "--resume", "run", cwd=cwd)
    assert again.returncode == 0, again.stderr
    assert weights(cwd) == weights(whole)
    assert states(cwd) == states(whole)
    assert figures(cwd) == figures(whole) == [1, 2, 3]


@pytest.mark.nightly
def test_a_run_whose_reward_changes_the_working_folder_is_the_same(train, whole):
    """No path of a run is relative once it has begun."""
    cwd, done = train(REWARD.format(harm=HARM["moves"], nth=2))
    assert done.returncode == 0, done.stderr
    assert weights(cwd) == weights(whole)
    assert states(cwd) == states(whole)


def test_a_run_whose_folder_is_removed_ends_with_an_error(train):
    _, done = train(REWARD.format(harm=HARM["wipes"], nth=6))
    assert done.returncode == 7, done.stderr
    assert "error STO111  the run directory was removed or moved" in done.stderr
    assert "done" not in done.stdout
