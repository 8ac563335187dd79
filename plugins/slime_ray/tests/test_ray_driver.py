"""Runs whose driver lives on a Ray cluster: `--detach`, `attach` and `stop`, and a driver that is lost.

Everything is real: Ray's own processes, the command line, a small model; a reward holds a run or kills its driver.
"""

import json
import os
import signal
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
    end = time.monotonic() + 240
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_detached_run_is_listed_not_doubled_and_stopped_in_order(detach, forked_slime, nodes, work, here):
    done, path = detach("stopped", order="8 held", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    pid, _ = held(work)
    assert (
        b"OMP_NUM_THREADS=3\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )  # the command's, not that of Ray's worker
    listed = forked_slime("attach", "--json", **where(nodes))
    (row,) = json.loads(listed.stdout)
    assert (row["name"], row["state"], row["run_dir"], row["pid"]) == ("stopped", "running", str(path), pid)
    before = record(path)
    twice = forked_slime("run", "--resume", path, "--detach", **where(nodes))
    assert twice.returncode == 2, twice.stderr
    assert "error CFG16" in twice.stderr
    assert f"slime attach {path}" in twice.stderr
    assert record(path) == before
    stopped = forked_slime("stop", "stopped", **where(nodes))
    assert stopped.returncode == 0, stopped.stderr
    assert f"ended with exit code 75: {path}" in stopped.stderr
    assert f"slime run --resume {path}" in stopped.stderr
    assert (record(path)["code"], record(path)["asked"]) == (75, "stop")
    assert forked_slime("attach", path).returncode == 75
    again = forked_slime("run", "--resume", path, "--detach", "--ray-address", nodes.address, **nodes.env)
    assert again.returncode == 0, again.stderr
    ended = forked_slime("attach", path, **nodes.env)
    assert ended.returncode == 0, ended.stderr
    same(path, here)
    assert [start["status"] for start in json.loads((path / "run.json").read_text())["starts"]] == [
        "stopped",
        "finished",
    ]


@pytest.mark.nightly
def test_stop_now_ends_a_run_that_does_not_listen(detach, forked_slime, nodes, work):
    done, path = detach("now", order="8 SIGSTOP driver")
    assert done.returncode == 0, done.stderr
    pid, _ = held(work)
    stopped = forked_slime("stop", path, "--now", "--json", **nodes.env)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout) == {"exit_code": 137, "run_dir": str(path)}
    assert not Path(f"/proc/{pid}").exists()
    until(lambda: not drivers(nodes))


def restarted(path, nodes, here, causes):
    """The run went on after each cause, lost nothing, and left no actor behind."""
    same(path, here)
    info = json.loads((path / "run.json").read_text())
    assert [start["status"] for start in info["starts"]] == ["running"] * len(causes) + ["finished"]
    assert [death["error"]["code"] for death in info["deaths"]] == ["SLM01"] * len(causes)
    log = (path / "log" / "driver.log").read_text()
    for number, cause in enumerate(causes, 1):
        assert f"RESTART {number} of 3 in {2 * number} s, after: SLM01 {cause}" in log
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["cause"].split()[0] for row in rows if row["kind"] == "restart"] == ["SLM01"] * len(causes)
    until(lambda: not drivers(nodes))


@pytest.mark.nightly
def test_a_driver_that_is_killed_and_then_its_keeper_are_no_end(detach, forked_slime, nodes, work, here):
    """The first is started again by its keeper, the second by Ray; both are restarts of one run, and counted as such."""
    done, path = detach("killed", order="9 SIGKILL driver")
    assert done.returncode == 0, done.stderr
    first, keeper = held(work)
    (work / "order").write_text("8 SIGKILL keeper")  # in the step after
    second, still = held(work)
    assert (second != first, still) == (True, keeper)
    seen = forked_slime("attach", path, **nodes.env)
    assert seen.returncode == 0, seen.stderr
    assert not Path(f"/proc/{second}").exists()  # it died with its keeper
    restarted(path, nodes, here, [f"the driver, process {pid} on " for pid in (first, second)])


@pytest.mark.nightly
def test_a_driver_that_is_lost_too_often_gives_up_with_the_first_cause(detach, forked_slime, nodes, work):
    done, path = detach("given-up", "--max-restarts", 1, order="2 SIGKILL driver")
    assert done.returncode == 0, done.stderr
    first, _ = held(work)
    (work / "order").write_text("1 SIGKILL driver")
    held(work)
    seen = forked_slime("attach", path, **nodes.env)
    assert seen.returncode == 1, seen.stderr
    assert f"error SLM01  the driver, process {first} on " in seen.stderr
    assert "1 restart(s) were allowed (cluster.max_restarts)" in seen.stderr
    assert record(path)["code"] == 1


@pytest.mark.nightly
def test_a_driver_whose_machine_is_lost_goes_on_on_another(detach, forked_slime, nodes, work, here):
    """All of a node is killed but the cluster's head process, and its launcher, which would end that too."""
    done, path = detach("moved", order="9 held")
    assert done.returncode == 0, done.stderr
    driver, keeper = held(work)
    name = "head" if keeper in nodes.pids("head") else "a"
    others = {*nodes.pids(name, "gcs_server"), *nodes.pids(name, "ray start")}
    for pid in nodes.pids(name, "ray start"):
        os.kill(pid, signal.SIGSTOP)
    for pid in set(nodes.pids(name)) - others:
        os.kill(pid, signal.SIGKILL)
    seen = forked_slime("attach", path, timeout=200, **nodes.env)
    assert seen.returncode == 0, seen.stderr
    assert (
        f"RESTART 1 of 3 in 2 s, after: SLM01 the driver, process {driver}"
        in (path / "log" / "driver.log").read_text()
    )
    same(path, here)


@pytest.mark.parametrize(
    ("more", "env", "told"),
    [
        pytest.param(("--cluster", "local"), {}, "--detach needs a Ray cluster to run on", id="no ray"),
        pytest.param(("--ray-address", "local"), {}, "a Ray cluster of the run's own ends with it", id="own"),
        pytest.param((), {"RAY_ADDRESS": ""}, "no address is given", id="no address"),
    ],
)
def test_a_run_that_would_not_outlive_the_command_is_refused(flags, forked_slime, work, more, env, told):
    """Before any cluster is looked for."""
    ray = ("--cluster", "ray", "--detach")
    done = forked_slime("run", *flags("refused"), *ray, *more, **{"RAY_ADDRESS": "127.0.0.1:1", **env})
    assert done.returncode == 2
    assert "error CFG04" in done.stderr
    assert told in done.stderr
    assert not (work / "refused").exists()
