"""`ray job submit -- slime run recipe.toml --cluster ray`: slime's usual way, to a cluster that takes jobs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_nodes import ray_cluster
from recorded import steps_of
from small_task import write_task

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytest.importorskip("aiohttp_cors", reason="not proven: Ray's job server is not installed (ray[default])")
pytestmark = [pytest.mark.system, pytest.mark.nightly]

STEPS = 2
RECIPE = """
seed = 4
[rollout]
hf_checkpoint = "MODEL"
num_rollout = 2
rollout_batch_size = 2
n_samples_per_prompt = 3
rollout_max_response_len = 8
[data]
prompt_data = "rows.jsonl"
input_key = "q"
label_key = "a"
[reward]
custom_rm_path = "digits.py:reward"
[train]
lr = 3e-3
dtype = "float32"
[report]
save_interval = 1
[cluster]
device = "cpu"
cpu_threads = 1
"""
REWARD = '''
"""Share of digits; where WAIT names a file, the eighth call waits until it is there."""
import os
import time
from itertools import count
from pathlib import Path

calls = count(1)


def reward(args, sample, **kw):
    if next(calls) == 8 and os.environ.get("WAIT"):
        Path(os.environ["WAIT"] + ".held").touch()
        while not Path(os.environ["WAIT"]).exists():
            time.sleep(0.01)
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A working directory to send, and the model beside it, which all machines see."""
    folder = write_task(tmp_path_factory.mktemp("job"), REWARD)
    (folder / "sent").mkdir()
    for name in ("rows.jsonl", "digits.py"):
        (folder / name).rename(folder / "sent" / name)
    (folder / "sent" / "recipe.toml").write_text(RECIPE.replace("MODEL", str(folder / "model")))
    return folder


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(dashboard=True) as found:
        agent = Path(found.where) / "session_latest" / "logs" / "dashboard_agent.log"
        until(lambda: agent.exists() and "Registered" in agent.read_text())  # it takes the jobs, and comes up last
        yield found


def until(happened, told=lambda: ""):
    """Wait for what another process does."""
    end = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < end, told()
        time.sleep(0.05)


@pytest.fixture
def job(nodes, work):
    """`ray job WORDS`."""
    ray = str(Path(sys.executable).with_name("ray"))

    def job(verb, *words):
        command = [ray, "job", verb, "--address", nodes.jobs, *map(str, words)]
        told = {**os.environ, **nodes.env, "NO_COLOR": "1"}
        return subprocess.run(command, env=told, cwd=work, capture_output=True, text=True, timeout=280)

    return job


def slime(*words):
    return ("--working-dir", "sent", "--", sys.executable, "-m", "slime_cli.main", "run", "recipe.toml", *words)


def test_a_job_trains_and_says_how_it_ended(job, work):
    done = job("submit", "--submission-id", "good", *slime("--cluster", "ray", "--run-dir", work / "good"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"done: {STEPS} steps" in done.stdout
    assert "Job 'good' succeeded" in done.stdout
    assert steps_of(work / "good", STEPS)[1]["trained"] == STEPS * 6
    sources = json.loads((work / "good" / "run.json").read_text())["sources"]
    assert any("working_dir_files" in path and path.endswith("digits.py") for path in sources)
    bad = job("submit", "--submission-id", "bad", *slime("--cluster", "ray"))
    assert bad.returncode != 0
    assert "error CFG20" in bad.stdout
    assert "exit code 2" in bad.stdout + job("status", "bad").stdout


def test_a_job_that_is_stopped_checkpoints_and_goes_on(job, work):
    """Ray sends SIGTERM, and kills what is left after RAY_JOB_STOP_WAIT_TIME_S, which a job may set for itself."""
    path, go = work / "stopped", work / "go"
    env = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120", "WAIT": str(go)}})
    told = ("--submission-id", "held", "--runtime-env-json", env, "--no-wait")
    begun = job("submit", *told, *slime("--cluster", "ray", "--run-dir", path))
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(Path(f"{go}.held").exists, lambda: job("logs", "held").stdout)
    stopped = job("stop", "held")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    info = json.loads((path / "run.json").read_text())
    assert (info["status"], info["exit_code"]) == ("stopped", 75)
    assert (path / "checkpoints").exists()
    again = job("submit", *slime("--resume", path))
    assert again.returncode == 0, again.stdout + again.stderr
    assert steps_of(path, STEPS) == steps_of(work / "good", STEPS)
