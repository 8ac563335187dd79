"""Runs ahead of training on a Ray cluster, evaluated beside it: the promises of one machine, kept by two engines.

Everything is real: Ray's own processes, a small model, the FSDP trainer, the ledger, the command line. The reward of
an evaluation comes only after the step that follows it, so an evaluation that stopped training would never end.
"""

import json
import shutil

import pytest
from ray_nodes import MARK, ray_cluster
from recorded import steps_of
from small_task import write_task

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytestmark = pytest.mark.system

STEPS, BATCH, SAMPLES = 4, 2, 3
REWARD = '''
"""Share of digits; where the file `kill` holds COUNT, the COUNT-th call of a training sample kills an engine."""
import json
import os
import signal
import time
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent
calls = count(1)


def an_engine():
    mark = (HERE / "cluster").read_text()
    for entry in sorted(Path("/proc").iterdir()):
        try:
            line = (entry / "cmdline").read_bytes().decode().replace("\\0", " ")
            if "slime_core.clusters.engine_process" in line and mark in (entry / "environ").read_bytes().decode():
                return int(entry.name)
        except (OSError, UnicodeDecodeError):
            continue
    raise RuntimeError("no engine")


def told(step):
    """Whether the run has told of a step."""
    lines = Path(os.environ["SLIME_TEST_METRICS"]).read_text().splitlines(keepends=True)
    whole = (json.loads(line) for line in lines if line.endswith("\\n"))  # the last one may be half written
    return any(row["kind"] == "step" and row["version"] >= step for row in whole)


def reward(args, sample, **kw):
    if sample.label.startswith("held"):
        version = max(sample.weight_versions)
        while "SLIME_TEST_METRICS" in os.environ and version < STEPS and not told(version + 1):
            time.sleep(0.01)
    else:
        number, order = next(calls), HERE / "kill"  # rewards run on several threads
        if order.exists() and number == int(order.read_text()):
            order.unlink()
            os.kill(an_engine(), signal.SIGKILL)
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''.replace("STEPS", str(STEPS))
AHEAD = ("--no-colocate", "--max-staleness", 1)
FREE = (*AHEAD[:2], 2, "--async-schedule", "free")
TWO = ("--rollout-num-engines", 2, "--eval-async")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = write_task(tmp_path_factory.mktemp("ray-async"), REWARD)
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"q": f"{a}+9=", "a": f"held {a}"}) + "\n" for a in range(6))
    )
    return folder


@pytest.fixture(scope="module")
def cluster(work):
    """Three processors: a rank, and an engine on each of the others."""
    with ray_cluster(processors=3) as nodes:
        (work / "cluster").write_text(f"{MARK}={nodes.mark}")
        yield nodes


@pytest.fixture
def run(work, forked_slime):
    """`slime run` in a process of its own; the answer and the run directory."""

    def run(name, *flags, nodes=None, **env):
        given = [
            *("--hf-checkpoint", work / "model", "--prompt-data", work / "rows.jsonl", "--input-key", "q"),
            *("--label-key", "a", "--custom-rm-path", f"{work / 'digits.py'}:reward", "--seed", 4),
            *("--num-rollout", STEPS, "--rollout-batch-size", BATCH, "--n-samples-per-prompt", SAMPLES),
            *("--rollout-max-response-len", 40, "--rollout-stop-token-ids", 3, "--rollout-stop-token-ids", 7),
            *("--eval-prompt-data", "held", work / "held.jsonl", "--eval-interval", 2),
            *("--eval-temperature", 1, "--lr", "3e-3", "--save-interval", 2, "--dtype", "float32"),
            *("--device", "cpu", "--cpu-threads", 1, "--run-dir", work / name),
        ]
        if nodes is not None:
            env |= nodes.env
            given += ["--cluster", "ray", "--ray-address", nodes.address]
        if "--eval-async" in flags:
            env["SLIME_TEST_METRICS"] = str(work / name / "metrics.jsonl")
        done = forked_slime("run", *given, *flags, timeout=280, **env)
        assert done.returncode == 0, done.stderr
        return done, work / name

    return run


def steps(path):
    found, counts = steps_of(path, STEPS)
    assert counts["pending"] == 0
    return [[sample.to_dict() for sample in step] for step in found]


def lines(path, kind):
    return [row for row in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def evaluations(path):
    """Figures by version; each version once."""
    rows = lines(path, "eval")
    assert sorted(row["version"] for row in rows) == [0, 2, STEPS]
    return {row["version"]: row["metrics"] for row in rows}


def weights(path):
    return (path / "final" / "model.safetensors").read_bytes()


@pytest.fixture
def here(work, run):
    """The lockstep run on this machine alone: one engine in a process of its own, evaluated between steps."""
    path = work / "here"
    if not (path / "final").exists():
        shutil.rmtree(path, ignore_errors=True)
        run("here", *AHEAD)
    return path


@pytest.mark.nightly
def test_two_engines_on_this_machine_evaluate_beside_training_with_the_figures_of_one_in_place(run, here):
    done, path = run("beside", *AHEAD, *TWO)
    assert "engine 1 runs in its own process" in done.stderr
    assert steps(path) == steps(here)
    assert weights(path) == weights(here)
    assert evaluations(path) == evaluations(here)
    assert len({json.dumps(figures) for figures in evaluations(path).values()}) == 3


@pytest.mark.nightly
def test_a_lockstep_run_on_a_cluster_is_that_of_one_machine_to_the_bit_and_so_are_its_evaluations(run, here, cluster):
    done, path = run("lockstep", *AHEAD, *TWO, nodes=cluster)
    assert "1 trainer rank(s), 2 engine(s)" in done.stderr
    assert steps(path) == steps(here)
    assert weights(path) == weights(here)
    assert evaluations(path) == evaluations(here)
    ages = [row["metrics"]["staleness/max"] for row in lines(path, "step")]
    assert ages == [min(version, 1) for version in range(STEPS)]


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
def test_a_free_run_on_a_cluster_keeps_the_bound_and_loses_nothing_also_when_an_engine_is_killed(
    killed, run, work, cluster
):
    """Groups come as they finish, weights change under them; a second start makes recorded steps again."""
    if killed:
        (work / "kill").write_text("14")
    # one sequence at a time on each engine: there is always one on its way when weights come
    done, path = run(f"free-{killed}", *FREE, *TWO, "--rollout-slots", 1, nodes=cluster)
    assert not (work / "kill").exists()
    assert ("ENG84" in done.stderr) == killed
    assert [row["number"] for row in lines(path, "restart")] == [1] * killed
    made, counts = steps_of(path, STEPS)
    assert (counts["trained"], counts["pending"]) == (STEPS * BATCH * SAMPLES, 0)
    ids = [sample.id for step in made for sample in step]
    assert len(set(ids)) == len(ids)
    for version, (step, row) in enumerate(zip(made, lines(path, "step"), strict=True)):
        ages = [version - min(sample.weight_versions) for sample in step]
        assert max(ages) == row["metrics"]["staleness/max"] <= 2
        assert sum(row["metrics"].get(f"staleness/{age}", 0) for age in range(3)) == pytest.approx(1)
    assert all(s.weight_versions == sorted(s.weight_versions) for step in made for s in step)
    assert any(len(set(s.weight_versions)) > 1 for step in made for s in step), "no update met a running request"
    evaluations(path)
