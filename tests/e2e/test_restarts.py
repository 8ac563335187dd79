"""Runs that go on by themselves after a process of theirs was killed or hung: the weights of one that nobody disturbed.

Everything is real: ranks and engines in processes of their own, killed from within a reward, the ledger, the command line.
"""

import json
import re

import pytest
from ray_nodes import ray_cluster
from recorded import alike, steps_of
from small_task import write_task

pytestmark = pytest.mark.system

STEPS, BATCH, SAMPLES = 3, 2, 3
REWARD = '''
"""Share of digits. The first line of the file `orders`, "CALL SIGNAL WORDS", is for the first start of the run: at that
call a process of it gets the signal; the next line is for the next start. "@CLUSTER WORDS": all of a node.
"""
import os
import signal
from contextlib import suppress
from itertools import count, product
from pathlib import Path

ORDERS = Path(__file__).with_name("orders")
calls, obeyed = count(1), []


def processes(mark, words=""):
    """Those of these words, or with an output so called, that have the mark in their environment or output; the oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            out = os.readlink(entry / "fd" / "1")
            line = (entry / "cmdline").read_bytes().decode().replace("\\0", " ")
            marks = out + (entry / "environ").read_bytes().decode(errors="replace")
            if words in line + out and mark in marks:
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def of_this_run(words):
    """The first process of these words that was started by a process of the run, on Ray or not."""
    return processes(os.environ["SLIME_TEST_RUN"], words)[0]


def node_of(cluster, words):
    """All processes of a node of a test's cluster, its head aside, on which a process of these words runs."""
    nodes = [f"SLIME_TEST_NODE={cluster}-{name}" for name in "ab"]
    return next(processes(node) for node in nodes if processes(node, words))


def reward(args, sample, **kw):
    number = next(calls)  # rewards run on several threads
    line, _, rest = ORDERS.read_text().partition("\\n")
    if line and not obeyed and number == int(line.split()[0]):
        obeyed.append(line)
        ORDERS.write_text(rest)
        _, name, words = line.split(maxsplit=2)
        if words.startswith("@"):  # a machine ends all at once
            for number, pid in product((signal.SIGSTOP, signal.SIGKILL), node_of(*words[1:].split())):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        else:
            os.kill(of_this_run(words), getattr(signal, name))
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))


def kill_a_rank(args, rollout_id, rollout_data):
    os.kill(of_this_run("log/rank-"), signal.SIGKILL)
'''
RANK, ENGINE = "log/rank-", "log/engine"
RANKS = ("--actor-num-gpus-per-node", 2)
AHEAD = ("--no-colocate", "--max-staleness", 1, "--async-schedule", "lockstep")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("restarts"), REWARD)


@pytest.fixture
def run(work, forked_slime):
    """`slime run` in a process of its own; the answer and the run directory. ``orders``: see the reward."""

    def run(name, *flags, orders=(), **env):
        (work / "orders").write_text("\n".join(orders))
        given = [
            *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4),
            *("--num-rollout", STEPS, "--rollout-batch-size", BATCH, "--n-samples-per-prompt", SAMPLES),
            *("--rollout-max-response-len", 8, "--lr", "3e-3", "--adam-eps", "1e-3", "--save-interval", 2),
            *("--dtype", "float32"),
            *("--device", "cpu", "--cpu-threads", 1, "--run-dir", work / name),
            "--no-async-save",  # what the second step saved is there before the third begins, in which a process is killed
        ]
        return forked_slime("run", *given, *flags, timeout=280, SLIME_TEST_RUN=str(work / name), **env), work / name

    return run


@pytest.fixture(scope="module")
def undisturbed():
    return {}


@pytest.fixture
def other(request, run, undisturbed):
    """The run directory of the same flags that nobody disturbed; two ranks, unless the test says which."""
    name, flags = getattr(request, "param", ("ranks", RANKS))
    if name not in undisturbed:
        done, undisturbed[name] = run(name, *flags)
        assert done.returncode == 0, done.stderr
    return undisturbed[name]


def steps(path):
    """The samples of every step and the counts, as the ledger has them."""
    found, counts = steps_of(path, STEPS)
    return [[sample.to_dict() for sample in step] for step in found], counts


def weights(path):
    return (path / "final" / "model.safetensors").read_bytes()


def restarts(path):
    """The restarts that the figures tell of."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "restart"]


def same(path, other):
    assert steps(path) == steps(other)
    assert weights(path) == weights(other)


@pytest.mark.parametrize(
    ("other", "flags", "words", "call", "told"),
    [
        pytest.param(("one", ()), RANKS, RANK, 15, "TRN105 trainer rank 0, process", id="rank"),
        pytest.param(
            ("ahead", AHEAD), AHEAD, ENGINE, 10, "ENG84 the engine's process", id="engine", marks=pytest.mark.nightly
        ),
        pytest.param(
            *(("ranks", RANKS), RANKS, RANK, 3, "TRN105 trainer rank 0, process"),
            id="rank-before-a-checkpoint",
            marks=pytest.mark.nightly,
        ),
    ],
    indirect=["other"],
)
def test_a_process_that_is_killed_is_no_end(run, other, flags, words, call, told):
    orders = [f"{call} SIGKILL {words}"]
    done, path = run(f"killed-{call}", *flags, "--max-restarts", 2, "--json", orders=orders)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == STEPS
    assert told in done.stderr
    assert "RESTART 1 of 2 in 2 s" in done.stderr
    (row,) = restarts(path)
    assert (row["number"], row["of"], row["version"]) == (1, 2, 2 if call > 12 else 0)
    assert row["cause"].startswith(told)
    assert re.search(r"RESTART 1 of 2, from version \d, after: " + told, (path / "log" / "run.log").read_text())
    starts = json.loads((path / "run.json").read_text())["starts"]
    assert [start["status"] for start in starts] == ["failed", "finished"]
    assert len({start["pid"] for start in starts}) == 1
    if other.name == "one":  # in the driver: quicker, and no sum of two ranks
        alike(path, other, STEPS)
    else:
        same(path, other)


@pytest.mark.nightly
def test_a_step_that_ends_the_run_twice_is_given_up_with_the_first_cause_first(run, work):
    """A rank dies before every optimizer step: a third process would end so too, whatever is allowed."""
    hook = ("--rollout-data-postprocess-path", f"{work / 'digits.py'}:kill_a_rank")
    done, path = run("twice", *RANKS, *hook, "--max-restarts", 9)
    assert done.returncode == 6, done.stderr
    assert done.stderr.count("RESTART") == 2, done.stderr  # of the process that ended, and of the one that began
    told = re.findall(r"^error TRN105  trainer rank 0, process (\d+), was killed", done.stderr, re.MULTILINE)
    assert len(told) == 2
    assert told[0] == told[1]
    assert "step 1 was not finished after the restart either" in done.stderr
    last = re.search(r"restart 1 ended with TRN105 trainer rank 0, process (\d+), was killed", done.stderr)
    assert last
    assert last[1] != told[0]
    assert [start["status"] for start in json.loads((path / "run.json").read_text())["starts"]] == ["failed", "failed"]


def stopped(path, done):
    """The page of a run of two ranks whose first one was stopped, and what the error says of it."""
    page = (path / "log" / "hang-0.txt").read_text()
    first = re.match(
        r"HANG  (rank 0 \(pid (\d+)\) is stopped \(state T\), for \d+ s in (\w+); rank 1 waits for it in \w+)\n", page
    )
    assert first, page
    assert f"error HNG125  {first[1]}" in done.stderr
    assert re.search(rf"^rank 0   +{first[2]} +\S+ +T stopped +{first[3]} +\d+ s", page, re.MULTILINE), page
    assert "it is stopped and cannot print its stack" in page
    assert re.search(r"^driver +\d+ +\S+ +\S .* (score|train|sync) +\d+ s", page, re.MULTILINE), page
    assert page.count("most recent call first") >= 4  # threads of rank 1 and of the driver
    assert "samples: 6 issued, 6 pending, 0 trained" in page
    assert page.splitlines()[0] in done.stderr
    return page, first[1]


@pytest.mark.nightly
def test_a_rank_that_is_stopped_ends_the_run_with_a_page_that_names_it(run):
    done, path = run("stopped", *RANKS, "--hang-timeout", 8, orders=[f"3 SIGSTOP {RANK}"])
    assert done.returncode == 9, done.stderr
    stopped(path, done)
    assert json.loads((path / "run.json").read_text())["error"] == "HNG125"


@pytest.mark.nightly
def test_a_run_goes_on_without_the_rank_that_was_stopped(run, other):
    flags = (*RANKS, "--max-restarts", 1, "--hang-timeout", 12)
    done, path = run("freed", *flags, orders=[f"3 SIGSTOP {RANK}"])
    assert done.returncode == 0, done.stderr
    _, first = stopped(path, done)
    assert restarts(path)[0]["cause"].startswith(f"HNG125 {first}")
    same(path, other)


RAY = (*RANKS, "--cluster", "ray", "--ray-address", "local")
HOST = "ray::Host"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(RANK, "TRN105 trainer rank 0, process", id="rank"),
        pytest.param(ENGINE, "ENG84 the engine's process", id="engine"),
        pytest.param(HOST, "(TRN105 trainer rank|ENG84 the engine's process).* was lost with its host on", id="host"),
    ],
)
def test_on_ray_a_part_that_is_killed_is_no_end(run, other, words, told):
    """`max_restarts` says nothing: on Ray it is 3. The samples and weights are those of one machine."""
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    done, path = run("ray-" + re.sub(r"\W", "", words), *RAY, orders=[f"15 SIGKILL {words}"])
    assert done.returncode == 0, done.stderr
    assert "RESTART 1 of 3 in 2 s" in done.stderr
    (row,) = restarts(path)
    assert re.match(told, row["cause"])
    assert row["version"] == 2
    same(path, other)


@pytest.mark.nightly
def test_on_ray_a_rank_that_is_stopped_is_named_through_its_host(run, other):
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    done, path = run("ray-stopped", *RAY, "--hang-timeout", 12, orders=[f"3 SIGSTOP {RANK}"])
    assert done.returncode == 0, done.stderr
    page, _ = stopped(path, done)
    assert re.search(r"^host 0 +\d+ +\S+ +\S .*it answers$", page, re.MULTILINE), page
    same(path, other)


@pytest.mark.nightly
def test_on_ray_a_host_that_is_stopped_is_named_and_the_run_goes_on_without_it(run, other):
    """Nobody can ask what is behind it; a cluster of the run's own begins again with it."""
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    done, path = run("ray-host-stopped", *RAY, "--hang-timeout", 12, orders=[f"3 SIGSTOP {HOST}"])
    assert done.returncode == 0, done.stderr
    page = (path / "log" / "hang-0.txt").read_text()
    assert re.match(r"HANG  host 0 \(pid \d+( on \S+)?\) cannot be asked: no answer from \S+ in 12 s", page), page
    assert "HNG125 host 0" in restarts(path)[0]["cause"]
    same(path, other)


@pytest.mark.nightly
def test_on_ray_a_machine_that_is_lost_is_replaced_by_another(run, other):
    """Two ranks on two of three nodes; the node of one is killed whole, and the run goes on on the other two."""
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    with ray_cluster("a", "b", processors=1) as nodes:
        flags = ("--actor-num-nodes", 2, "--cluster", "ray", "--ray-address", nodes.address)
        done, path = run("ray-node", *flags, orders=[f"15 SIGKILL @{nodes.mark} {RANK}"], **nodes.env)
        assert done.returncode == 0, done.stderr
    (row,) = restarts(path)
    assert re.match("(TRN105 trainer rank|ENG84 the engine's process).* was lost", row["cause"])
    assert row["version"] == 2
    same(path, other)
