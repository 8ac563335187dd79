"""Runs on a Ray cluster: the same samples and weights as on this machine alone, and an end with a cause when a part dies.

Everything is real: Ray's own processes, a small model, the FSDP trainer, the ledger, the command line.
"""

import json
import os
import socket
from pathlib import Path

import pytest
from ray_nodes import MARK, ray_cluster
from recorded import alike, steps_of
from small_task import write_task

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytestmark = pytest.mark.system

STEPS, BATCH, SAMPLES = 3, 2, 3
REWARD = '''
"""Share of digits; where the file `kill` holds COUNT and words, the COUNT-th call kills the first process of them."""
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent
calls = []


def of_the_cluster(words):
    for entry in sorted(Path("/proc").iterdir()):
        try:
            line = (entry / "cmdline").read_bytes().decode().replace("\\0", " ")
            mark = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if words in line and f"MARK={(HERE / 'cluster').read_text()}" in mark:
            return int(entry.name)
    raise RuntimeError(f"no process of {words}")


def reward(args, sample, **kw):
    order = HERE / "kill"
    calls.append(sample.index)
    try:
        count, words = order.read_text().split(maxsplit=1)
    except FileNotFoundError:  # nothing is to be killed, or another call did it
        count = 0
    if len(calls) == int(count):
        order.unlink()
        os.kill(of_the_cluster(words), signal.SIGKILL)
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''.replace("MARK", MARK)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("ray"), REWARD)


@pytest.fixture(scope="module")
def nodes(work):
    """A Ray cluster of two processors that several runs join."""
    with ray_cluster() as found:
        (work / "cluster").write_text(f"{found.mark}-head")
        yield found


@pytest.fixture(scope="module")
def cluster(nodes):
    """Its address and what a driver needs to enter it."""
    return nodes.address, nodes.env


@pytest.fixture
def run(work, forked_slime):
    """`slime run` in a process of its own; the answer and the run directory."""

    def run(name, *flags, **env):
        given = [
            *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4),
            *("--num-rollout", STEPS, "--rollout-batch-size", BATCH, "--n-samples-per-prompt", SAMPLES),
            *("--rollout-max-response-len", 8, "--lr", "3e-3", "--adam-eps", "1e-3", "--save-interval", 1),
            *("--dtype", "float32"),
            *("--device", "cpu", "--cpu-threads", 1, "--run-dir", work / name),
        ]
        return forked_slime("run", *given, *flags, timeout=280, **env), work / name

    return run


def steps(path):
    """The samples of every step and the counts, as the ledger has them."""
    found, counts = steps_of(path, STEPS)
    return [[sample.to_dict() for sample in step] for step in found], counts


def weights(path):
    return (path / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(work):
    """The same run on this machine alone: two ranks, one engine in the driver."""
    return {}


@pytest.fixture
def here(run, alone):
    if not alone:
        done, alone["path"] = run("here", "--actor-num-gpus-per-node", 2)
        assert done.returncode == 0, done.stderr
    return alone["path"]


@pytest.mark.nightly
def test_two_ranks_and_two_engines_on_a_cluster_make_the_samples_and_weights_of_one_machine(run, cluster, here):
    address, env = cluster
    flags = ("--actor-num-gpus-per-node", 2, "--cluster", "ray", "--rollout-num-engines", 2, "--ray-address", address)
    done, path = run("joined", *flags, **env)
    assert done.returncode == 0, done.stderr
    assert f"Ray at {address}: 2 trainer rank(s), 2 engine(s)" in done.stderr
    assert steps(path) == steps(here)
    assert weights(path) == weights(here)
    assert {file.name for file in (path / "log").iterdir()} >= {
        "rank-0.log",
        "rank-1.log",
        "engine-0.log",
        "engine-1.log",
    }


@pytest.mark.nightly
def test_ranks_on_two_nodes_meet_at_a_port_of_the_first(run, nodes, cluster, here):
    """Four bundles on nodes of two processors; ranks with a bundle each do not count on one machine."""
    address, env = cluster
    with nodes.node("second", f"--address={address}", processors=2):
        flags = ("--actor-num-nodes", 2, "--cluster", "ray", "--ray-address", address)
        done, path = run("nodes", *flags, "--no-colocate", "--rollout-num-engines", 2, **env)
    assert done.returncode == 0, done.stderr
    assert steps(path)[0] == steps(here)[0]
    assert weights(path) == weights(here)
    assert "2 trainer rank(s), 2 engine(s)" in done.stderr


def test_a_cluster_of_its_own_makes_the_weights_of_one_machine_listens_on_the_loopback_and_ends(run, work):
    own = f"own-{os.getpid()}"
    (work / "listening.py").write_text(LISTENING.replace("SLIME_TEST_NODE=own", f"{MARK}={own}"))
    flags = ("--cluster", "ray", "--actor-num-gpus-per-node", 2, "--rollout-num-engines", 1)
    hook = ("--rollout-sample-hook-path", f"{work}/listening.py:look")
    done, path = run("own", *flags, *hook, RAY_ADDRESS="", **{MARK: own})
    assert done.returncode == 0, done.stderr
    done, one = run("one")  # in its driver: the nightly runs have two ranks here, and the same bits
    assert done.returncode == 0, done.stderr
    alike(path, one, STEPS)
    pids, open_to_others, of_the_dashboard, modes = json.loads((work / "listening.json").read_text())
    assert open_to_others == []
    assert set(of_the_dashboard) <= {FIGURES}  # its process serves no pages and takes no jobs
    assert modes == ["token"] * 2  # of the head and of the node
    assert len(pids) > 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and MARK in environ(pid)]


FIGURES = "0100007F:ACC3"
"""127.0.0.1:44227, as /proc has it: that process's own use of memory, for Prometheus, opened after its start. No other port is."""


def environ(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


LISTENING = '''
"""Processes that bear the mark, and addresses beside the loopback on which one of them listens."""
import json
import os
import os
from pathlib import Path

def look(args, samples, **kw):
    mark, pids, sockets, dashboard, modes = b"SLIME_TEST_NODE=own", [], set(), set(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (environ := (entry / "environ").read_bytes()):
                    pids.append(int(entry.name))
                    mine = {os.readlink(fd) for fd in (entry / "fd").iterdir()}
                    sockets |= mine
                    line = (entry / "cmdline").read_bytes().split(b"\\0")
                    if any(word.endswith(b"/dashboard.py") for word in line):
                        dashboard |= mine
                    if line[0].endswith((b"/gcs_server", b"/raylet")):
                        found = [word for word in environ.split(b"\\0") if word.startswith(b"RAY_AUTH_MODE=")]
                        modes += [word.decode().partition("=")[2] for word in found]
            except OSError:
                continue
    others, served = [], []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            ours = words[3] == "0A" and f"socket:[{words[9]}]" in sockets
            if words[3] == "0A" and f"socket:[{words[9]}]" in dashboard:
                served.append(words[1])
            address = words[1].partition(":")[0]
            if ours and address not in ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"):
                others.append(words[1])
    Path(__file__).with_name("listening.json").write_text(json.dumps([pids, others, served, modes]))
'''


@pytest.mark.nightly  # a minute each; `test_async_runs.py` kills the same parts where there is no cluster
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        pytest.param("slime_core.clusters.ranks", 6, ("TRN105", "trainer rank 0, process", "SIGKILL"), id="rank"),
        pytest.param("slime_core.clusters.engine_process", 5, ("ENG84", "SIGKILL"), id="engine"),
        pytest.param("ray::Host", 5, ("lost with its host",), id="host"),
    ],
)
def test_a_part_that_is_killed_ends_the_run_with_its_cause_and_a_resumed_one_loses_nothing(
    run, cluster, here, work, forked_slime, words, code, told
):
    address, env = cluster
    name = f"killed-{words.rpartition('.')[2].rpartition(':')[2]}"
    (work / "kill").write_text(f"8 {words}")
    flags = ("--actor-num-gpus-per-node", 2, "--cluster", "ray", "--ray-address", address, "--max-restarts", 0)
    done, path = run(name, *flags, **env)
    assert not (work / "kill").exists()
    assert done.returncode in (code, 6 if words == "ray::Host" else code), done.stderr
    assert all(word in done.stderr for word in told), done.stderr
    assert "ActorDiedError" not in done.stderr.partition("why:")[0]
    counts = steps(path)[1]
    assert 0 < counts["trained"] < STEPS * BATCH * SAMPLES
    again = forked_slime("run", "--resume", path, timeout=280, **env)
    assert again.returncode == 0, again.stderr
    assert steps(path)[0] == steps(here)[0]
    assert weights(path) == weights(here)


@pytest.mark.nightly
def test_a_run_that_is_too_large_is_told_what_is_wanted_and_what_is_there(run, cluster):
    address, env = cluster
    flags = ("--actor-num-gpus-per-node", 9, "--cluster", "ray", "--ray-address", address)
    detached, path = run("detached", *flags, "--detach", **env)
    assert (detached.returncode, path.exists()) == (2, False)
    assert "error CFG18" in detached.stderr
    done, _ = run("large", *flags, **env)
    assert done.returncode == 2
    assert "error CFG18" in done.stderr
    assert "wanted: 1 x (9 CPU); free: " in done.stderr
    assert "(2 CPU)" in done.stderr


def test_an_address_without_a_cluster_is_refused(run):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]  # free, and nobody's when it is closed
    done, _ = run("nowhere", "--cluster", "ray", "--ray-address", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert "error CFG17" in done.stderr
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Connection refused" in done.stderr
