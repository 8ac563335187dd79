"""Runs ahead of training, with the engine in its own process: what they promise, and what is left when a process dies.

Everything is real: a small model, the FSDP trainer, the ledger, the command line. A reward function, which runs in the
driver, kills a child where a test asks it to.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_channel import fork
from recorded import steps_of
from small_task import write_task

from slime_cli.main import main
from slime_cli.starts import starts_of
from slime_core.clusters.channel import ProcessChannel
from slime_core.report import RunDir

pytestmark = pytest.mark.system

REWARD = '''
"""Share of digits; where the file `kill` says MODULE COUNT RUN, the COUNT-th call kills the first such child, or us."""
import os
import signal
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
calls = Counter()


def children():
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                line = (entry / "cmdline").read_bytes().decode().split("\\0")
            except OSError:
                continue
            if parent == os.getpid() and "-m" in line:
                found[int(entry.name)] = line[line.index("-m") + 1]
    return found


def reward(args, sample, **kw):
    order = HERE / "kill"
    module, count, run = order.read_text().split() if order.exists() else ("", "0", "")
    calls[run] += 1
    if module and calls[run] == int(count):
        order.unlink()
        (HERE / "children").write_text(" ".join(map(str, children())))
        if module == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(next(pid for pid, name in sorted(children().items()) if name == module), signal.SIGKILL)
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''
ENGINE, RANK = "slime_core.clusters.engine_process", "slime_core.clusters.ranks"
STEPS, BATCH, SAMPLES = 5, 2, 3
AHEAD = ("--no-colocate", "--max-staleness", "1")
FREE = ("--no-colocate", "--max-staleness", "2", "--async-schedule", "free")
DEADLINE = 150.0  # seconds until something that should have ended counts as hanging


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("async"), REWARD)


def _flags(work, *flags):
    given = [
        *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
        *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4, "--num-rollout", STEPS),
        *("--rollout-batch-size", BATCH, "--n-samples-per-prompt", SAMPLES, "--rollout-max-response-len", 60),
        *("--rollout-stop-token-ids", 3, "--rollout-stop-token-ids", 7, "--lr", "3e-3", "--save-interval", 2),
        *("--dtype", "float32", "--device", "cpu", "--cpu-threads", 1),
    ]
    return [str(word) for word in (*given, *flags)]


def _run(work, name, *flags, code=0, kill=""):
    if kill:
        (work / "kill").write_text(f"{kill} {name}")
    with pytest.MonkeyPatch.context() as patch:
        if not kill:  # who is killed is found by its command
            patch.setattr(ProcessChannel, "start", classmethod(fork))
        assert main(["run", *_flags(work, *flags), "--run-dir", str(work / name)]) == code
    assert not (work / "kill").exists()
    return work / name


def _resume(path):
    assert main(["run", "--resume", str(path)]) == 0


def _steps(run, steps=STEPS):
    return steps_of(run, steps)


def _metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line.get("kind") == "step"]


def _weights(run):
    return (run / "final" / "model.safetensors").read_bytes()


def _clocked(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("async/", "ledger/"))}


@pytest.fixture(scope="module")
def whole(work):
    """A lockstep run that nobody disturbs."""
    return _run(work, "whole", *AHEAD)


def test_in_a_lockstep_run_each_group_is_made_by_one_version(whole):
    one, counts = _steps(whole)
    assert counts["pending"] == 0
    assert len({s.response_length for step in one for s in step}) > 3
    for version, step in enumerate(one):
        for sample in step:
            assert set(sample.weight_versions) == {max(0, sample.group_index // BATCH - 1)} == {max(0, version - 1)}
    for version, metrics in enumerate(_metrics(whole)):
        age = min(version, 1)
        assert (metrics["staleness/max"], metrics[f"staleness/{age}"]) == (age, 1.0)
        assert metrics["async/engine_idle_seconds"] >= 0


@pytest.mark.parametrize("policy", ["wait", pytest.param("drop", marks=pytest.mark.nightly)])
def test_a_free_run_generates_while_it_trains_within_the_bound(policy, work):
    """Overlap by events: a sample with tokens of versions v and v + 1 was on its way while step v trained."""
    slow = ("--rollout-slots", "2", "--rollout-max-response-len", "200")  # generation takes longer than training
    run = _run(work, policy, *FREE, "--stale-policy", policy, *slow)
    steps, counts = _steps(run)
    assert [len(step) for step in steps] == [BATCH * SAMPLES] * STEPS
    assert counts["pending"] == 0
    assert {name for name in counts if name.startswith("dropped/")} <= (
        {"dropped/stale"} if policy == "drop" else set()
    )
    ages = [version - min(s.weight_versions) for version, step in enumerate(steps) for s in step]
    assert max(ages) <= 2
    assert [m["staleness/max"] for m in _metrics(run)] == [
        max(version - min(s.weight_versions) for s in step) for version, step in enumerate(steps)
    ]
    spans = [s for step in steps for s in step if len(set(s.weight_versions)) > 1]
    assert spans, "nothing was generated while a step trained"
    assert all(s.weight_versions == sorted(s.weight_versions) for s in spans)


@pytest.mark.nightly  # `test_engine_process.py` kills one alone, `test_restarts.py` a rank of a run
def test_a_killed_engine_ends_the_run_with_5_and_a_resumed_one_has_the_weights_of_one_never_disturbed(
    whole, work, capfd
):
    """Bit for bit, and with other slots."""
    run = _run(work, "engine", *AHEAD, "--rollout-slots", "5", code=5, kill=f"{ENGINE} 13")
    told = capfd.readouterr().err
    assert "ENG84" in told
    assert "was killed by SIGKILL" in told
    counts = _steps(run)[1]
    assert counts["pending"] > 0
    assert 0 < counts["trained"] < STEPS * BATCH * SAMPLES
    _resume(run)
    assert _weights(run) == _weights(whole)
    assert list(map(_clocked, _metrics(run))) == list(map(_clocked, _metrics(whole)))
    again, counts = _steps(run)
    assert (counts["trained"], counts["pending"]) == (STEPS * BATCH * SAMPLES, 0)
    assert [[s.to_dict() for s in step] for step in again] == [
        [s.to_dict() for s in step] for step in _steps(whole)[0]
    ]
    assert starts_of(RunDir.open(run))[-1]["epoch"] == 2


@pytest.mark.nightly
def test_a_free_run_whose_engine_was_killed_replays_what_was_recorded(work):
    run = _run(work, "free-engine", *FREE, code=5, kill=f"{ENGINE} 16")
    before, counts = _steps(run)
    recorded = [[s.to_dict() for s in step] for step in before if step]
    assert recorded
    _resume(run)
    after, counts = _steps(run)
    assert [[s.to_dict() for s in step] for step in after][: len(recorded)] == recorded
    assert (counts["trained"], counts["pending"]) == (STEPS * BATCH * SAMPLES, 0)
    assert all(metrics["staleness/max"] <= 2 for metrics in _metrics(run))
    ids = [s.id for step in after for s in step]
    assert len(set(ids)) == len(ids)


@pytest.mark.nightly
def test_a_killed_rank_is_named_at_once_and_the_others_end(work, capfd):
    """Exit 6 with TRN105, a whole ledger, no process left; the run goes on when it is resumed."""
    run = _run(work, "rank", "--actor-num-gpus-per-node", "2", code=6, kill=f"{RANK} 9")
    told = capfd.readouterr().err
    assert "TRN105" in told
    assert "trainer rank 0, process" in told
    assert "was killed by SIGKILL" in told
    ranks = list(map(int, (work / "children").read_text().split()))
    assert len(ranks) == 2
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    counts = _steps(run)[1]
    assert counts["trained"] == BATCH * SAMPLES
    _resume(run)
    assert _steps(run)[1]["trained"] == STEPS * BATCH * SAMPLES


@pytest.mark.nightly
def test_a_killed_driver_leaves_no_child(work):
    """The kernel ends the engine and the ranks with the process that started them."""
    (work / "kill").write_text("driver 9 driver")
    words = _flags(work, *AHEAD, "--actor-num-gpus-per-node", "2", "--run-dir", work / "driver")
    driver = subprocess.run(
        [sys.executable, "-m", "slime_cli.main", "run", *words], capture_output=True, timeout=5 * DEADLINE
    )
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    children = list(map(int, (work / "children").read_text().split()))
    assert len(children) == 3
    for pid in children:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        gone, _, _ = select.select([handle], [], [], DEADLINE)
        os.close(handle)
        assert gone, f"process {pid} outlived its driver"
