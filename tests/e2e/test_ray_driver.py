"""Runs whose driver lives on a Ray cluster: `--detach`, `attach` and `stop`, and a driver that is lost.

Everything is real: Ray's own processes, the command line, a small model; a reward holds a run or kills its driver.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_nodes import ray_cluster
from recorded import steps_of
from small_task import write_task

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytestmark = pytest.mark.system

STEPS, BATCH, SAMPLES = 3, 2, 3
REWARD = '''
"""Share of digits. The file `order` may say "CALL held", to wait there until the file `go` is made, or "CALL SIGNAL
driver" or "CALL SIGNAL keeper", whose process then gets the signal."""
import os
import signal
import time
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent
calls = count(1)


def reward(args, sample, **kw):
    number, order = next(calls), (HERE / "order").read_text().split()
    if order and number == int(order[0]):
        (HERE / "order").write_text("")
        (HERE / "pid").write_text(f"{os.getpid()} {os.getppid()}")
        if order[1] == "held":
            while not (HERE / "go").exists():
                time.sleep(0.01)
        else:
            os.kill(os.getpid() if order[2] == "driver" else os.getppid(), getattr(signal, order[1]))
            time.sleep(60)
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("detached"), REWARD)


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster("a", processors=1) as found:
        yield found


@pytest.fixture
def flags(work):
    """A run of three short steps, a checkpoint each; ``order`` is for the reward."""

    def flags(name, order=""):
        (work / "order").write_text(order)
        (work / "go").unlink(missing_ok=True)
        return (
            *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4),
            *("--num-rollout", STEPS, "--rollout-batch-size", BATCH, "--n-samples-per-prompt", SAMPLES),
            *("--rollout-max-response-len", 8, "--lr", "3e-3", "--save-interval", 1, "--dtype", "float32"),
            *("--device", "cpu", "--cpu-threads", 1, "--run-dir", work / name),
        )

    return flags


@pytest.fixture
def detach(flags, forked_slime, nodes, work):
    """`slime run --detach`; the answer and the run directory. What a test leaves running is ended."""
    begun = []

    def detach(name, *more, order="", **env):
        ray = ("--cluster", "ray", "--detach", "--json")
        done = forked_slime("run", *flags(name, order), *ray, *more, **{**where(nodes), **env})
        begun.append(work / name)
        return done, work / name

    yield detach
    for path in begun:
        if (path / "driver.json").exists() and record(path)["code"] is None:
            forked_slime("stop", path, "--now", **where(nodes))


@pytest.fixture(scope="module")
def alone(work):
    return {}


@pytest.fixture
def here(flags, forked_slime, work, alone):
    """The same run on this machine alone."""
    if not alone:
        alone["path"] = work / "here"
        done = forked_slime("run", *flags("here"))
        assert done.returncode == 0, done.stderr
    return alone["path"]


def where(nodes):
    return {**nodes.env, "RAY_ADDRESS": nodes.address}


def record(path):
    return json.loads((path / "driver.json").read_text())


def same(path, other):
    """Samples of every step, counts and weights."""
    assert steps_of(path, STEPS) == steps_of(other, STEPS)
    assert (path / "final" / "model.safetensors").read_bytes() == (other / "final" / "model.safetensors").read_bytes()


def until(happened):
    """Wait for what another process does."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def held(work):
    """Wait until the reward holds the run; process ids of the driver and of its keeper."""
    until((work / "pid").exists)
    driver, keeper = map(int, (work / "pid").read_text().split())
    (work / "pid").unlink()
    return driver, keeper


def drivers(nodes):
    """Processes of the cluster's keepers."""
    return nodes.pids(words="ray::Driver")


def test_a_detached_run_is_followed_to_its_end_and_leaves_no_actor(detach, forked_slime, nodes, here):
    done, path = detach("followed")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["run_dir"] == str(path)
    assert answer["actor"] == record(path)["actor"]
    assert f"slime attach {path}" in done.stderr
    assert f"slime stop {path}" in done.stderr
    seen = forked_slime("attach", path, **nodes.env)
    assert seen.returncode == 0, seen.stderr
    assert f"done: {STEPS} steps" in seen.stderr
    assert f"main step {STEPS}/{STEPS}" in seen.stderr
    assert record(path)["code"] == 0
    same(path, here)
    until(lambda: not drivers(nodes))
    listed = forked_slime("attach", "--json", **where(nodes))
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])
    again = forked_slime("attach", path)  # its cluster need not answer any more
    assert again.returncode == 0
    assert f"done: {STEPS} steps" in again.stderr
