"""Real `slime run` processes with torch, killed at every durable boundary and at random: the same `final/`, always.

What belongs to `make test` forks its processes from one that has imported
torch (`tests/forking`); the nightly tests start each as a user does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from forked import Zygote

from durability.audit import audit, differences
from durability.chaos import left_behind, tail
from slime_core.failpoints import NAMES

REWARD = '''
def reward(args, sample, **kw):
    """Share of digits, so that groups differ."""
    return sum(char.isdigit() for char in sample.response) / (1 + len(sample.response))
'''
RECIPE = """
name = "chaos"
seed = 4
[cluster]
device = "cpu"
cpu_threads = 1
[data]
prompt_data = "rows.jsonl"
input_key = "q"
label_key = "a"
[rollout]
hf_checkpoint = "model"
num_rollout = 6
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 12
[train]
dtype = "float32"
lr = 3e-3
[reward]
custom_rm_path = "digits.py:reward"
[eval]
skip_eval_before_train = true
[report]
save_interval = 2
save_keep = 1
ledger_keep_steps = 1
"""
DROPS = ("--dynamic-sampling", "equal_rewards")
RECIPES = {
    "sync": DROPS,
    "over": ("--over-sampling-batch-size", "4", "--partial-rollout", "--rollout-max-response-len", "32"),
    "lockstep": ("--no-colocate", "--max-staleness", "1", *DROPS),
    "ranks": ("--actor-num-gpus-per-node", "2", *DROPS),
}
ONLY_AGAIN = ("ledger.rewind.before", "ledger.rewind.after", "rundir.metrics.trimmed")
"""Failpoints that only a resumed run comes to."""


@dataclass(frozen=True)
class End:
    """How a process ended, and what of its session was still there then."""

    code: int
    left: tuple[int, ...]
    log: Path


class Work:
    """A folder with a model, rows, a reward and a recipe, and runs in it."""

    def __init__(self, folder: Path, recipe: str, zygote: Zygote | None = None) -> None:
        self.folder, self.recipe, self.zygote = folder, recipe, zygote
        self.log = folder / "log.txt"

    @classmethod
    def make(cls, folder: Path, recipe: str, zygote: Zygote | None = None) -> Self:
        from slime_core.testing import tiny_model

        folder.mkdir(parents=True, exist_ok=True)
        tiny_model(folder / "model", hidden=32, layers=1)
        rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(5) for b in range(5)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "digits.py").write_text(REWARD)
        (folder / "recipe.toml").write_text(RECIPE)
        return cls(folder, recipe, zygote)

    def words(self, name: str) -> list[str]:
        """One command, whatever there is: a new run, or to go on with it."""
        return ["run", "recipe.toml", "--run-dir", name, "--resume", "auto", *RECIPES[self.recipe]]

    def start(self, name: str, *, failpoint: str = "", names: Path | None = None) -> End:
        """Start or resume the run and wait for its end."""
        if self.zygote is not None:
            ended = self.zygote.ask(
                args=self.words(name), cwd=str(self.folder), log=str(self.log), failpoint=failpoint,
                names=str(names) if names else "",
            )  # fmt: skip
            return End(ended["code"], tuple(ended["left"]), self.log)
        process = self.popen(name, failpoint=failpoint)
        try:
            code = process.wait(180)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(30)
            raise
        return End(code, left_behind(process.pid), self.log)

    def popen(self, name: str, *, failpoint: str = "") -> subprocess.Popen[bytes]:
        """The command in a session of its own, its output in the log."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONFAULTHANDLER": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "slime_cli.main", *self.words(name)],
                cwd=self.folder,
                env={**environment, "SLIME_FAILPOINT": failpoint},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self, name: str, tries: int = 2) -> None:
        """Resume until it ends."""
        for _ in range(tries):
            end = self.start(name)
            assert end.left == (), f"processes {end.left} outlived their run"
            if end.code == 0:
                return
        raise AssertionError(f"the run ends with {end.code}:\n{tail(self.log)}")

    def judged(self, name: str) -> Any:
        """What the finished run holds; everything must be in order."""
        found = audit(self.folder / name)
        assert found.wrong == []
        return found


def killed_at(work: Work, name: str, point: str, nth: int) -> bool:
    """Kill a run where it comes to a failpoint for the nth time, and resume it; False where it never came there.

    What only a resumed run comes to is met once a start: the nth time is then the nth resume.
    """
    if point in ONLY_AGAIN:
        assert work.start(name, failpoint="ledger.trained.after:3=kill").code == -signal.SIGKILL
        ends = [work.start(name, failpoint=f"{point}:1=kill") for _ in range(nth)]
    else:
        ends = [work.start(name, failpoint=f"{point}:{nth}=kill")]
    codes = Counter(end.code for end in ends)
    assert all(end.left == () for end in ends), f"processes outlived their run: {ends}"
    assert set(codes) <= {0, -signal.SIGKILL}, f"{point}:{nth} ended with {codes}:\n{tail(work.log)}"
    if codes[0]:
        return False
    work.finish(name)
    return True


def kill_one(process: subprocess.Popen[bytes], rng: random.Random, seconds: float) -> str:
    """After a random time kill the run's driver or one of its children; the answer names which, "" for a run that ended."""
    deadline = time.monotonic() + rng.uniform(0.0, seconds)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return ""
        time.sleep(0.002)
    victims = [process.pid, *children(process.pid)]
    victim = rng.choice(victims)
    what = "driver" if victim == process.pid else "child"
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return what


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def killed_at_random(work: Work, name: str, rng: random.Random, kills: int, seconds: float) -> Counter[str]:
    """Kill the driver or a child of it, up to ``kills`` times in all, then let the run end; the answer counts victims.

    A driver whose child was killed must end by itself, with an error that says so, and nothing may outlive it.
    """
    victims: Counter[str] = Counter()
    while victims.total() < kills:
        process = work.popen(name)
        victim = kill_one(process, rng, seconds)
        code = process.wait(180)
        left = left_behind(process.pid)
        assert left == (), f"processes {left} outlived their run ({victim} was killed)\n{tail(work.log)}"
        if code == 0:
            break
        expected = code == -signal.SIGKILL if victim == "driver" else 0 < code < 64
        assert expected, f"{victim} was killed, the run ended with {code}:\n{tail(work.log)}"
        victims[victim] += 1
    else:
        work.finish(name)
    return victims


AHEAD = ("rollout/issued_groups", "rollout/dropped_samples", "dropped/", "async/")
HERE = [  # what `make test` kills at; every other boundary is nightly
    ("sync", "ledger.journal.after", 2),
    ("sync", "checkpoint.renamed", 2),
    ("sync", "ledger.rewind.after", 1),
    ("over", "ledger.finish.synced", 3),
]


class Place:
    """The runs of one recipe, and the one that was left alone."""

    def __init__(self, folder, recipe, zygote=None):
        self.work = Work.make(folder, recipe, zygote)
        self.names = folder / "names.json"
        begun = time.monotonic()
        end = self.work.start("alone", names=self.names if zygote else None)
        assert (end.code, end.left) == (0, ()), tail(end.log)
        self.seconds = time.monotonic() - begun  # of a whole run, start-up included: kills fall anywhere in it
        self.alone = self.work.judged("alone")

    def same(self, name):
        """The run ended as the one that was left alone did."""
        ignored = AHEAD if self.work.recipe == "lockstep" else ()
        assert differences(self.alone, self.work.judged(name), ignored) == []


@pytest.fixture(scope="module")
def forked(zygote, tmp_path_factory):
    """Places by recipe, made when they are asked for; their runs are forked."""
    places = {}

    def place(recipe):
        if recipe not in places:
            places[recipe] = Place(tmp_path_factory.mktemp(recipe), recipe, zygote)
        return places[recipe]

    return place


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Places by recipe; their runs are processes of their own."""
    places = {}

    def place(recipe):
        if recipe not in places:
            places[recipe] = Place(tmp_path_factory.mktemp(recipe), recipe)
        return places[recipe]

    return place


@pytest.mark.system
@pytest.mark.parametrize(("recipe", "point", "nth"), HERE)
def test_a_run_killed_at_a_boundary_ends_in_the_same_weights(forked, recipe, point, nth):
    place = forked(recipe)
    assert killed_at(place.work, f"{point}-{nth}", point, nth), f"the run never came to {point} for the {nth}. time"
    place.same(f"{point}-{nth}")


@pytest.mark.system
def test_every_boundary_is_met_by_some_run(forked):
    met = Counter()
    for recipe in ("sync", "over"):
        met.update(json.loads(forked(recipe).names.read_text()))
    work = forked("sync").work
    assert work.start("again", failpoint="ledger.trained.after:3=kill").code == -signal.SIGKILL
    assert work.start("again", names=work.folder / "names-again.json").code == 0
    met.update(json.loads((work.folder / "names-again.json").read_text()))
    assert set(NAMES) - set(met) == set()


@pytest.mark.system
def test_three_kills_at_random_with_torch_in_the_loop(forked):
    """The driver, forked; the nightly kills its children too."""
    place, rng = forked("sync"), random.Random(11)
    kills = tries = 0
    while kills < 3 and tries < 24:
        tries += 1
        ended = place.work.zygote.ask(
            args=place.work.words(f"random-{tries // 3}"),
            cwd=str(place.work.folder),
            log=str(place.work.log),
            seconds=rng.uniform(0.1, 0.9),  # a run takes one to two alone
        )
        assert ended["code"] in (0, -signal.SIGKILL), tail(place.work.log)
        assert ended["left"] == []
        kills += ended["code"] == -signal.SIGKILL
    assert kills == 3
    for name in {f"random-{number // 4}" for number in range(1, tries + 1)}:
        place.work.finish(name)
        place.same(name)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", NAMES)
@pytest.mark.parametrize("recipe", ["sync", "over", "lockstep"])
def test_kills_at_every_boundary_at_its_first_three_times(started, recipe, point):
    """True `slime run` processes. A boundary that this recipe does not come to is met by another one."""
    place = started(recipe)
    for nth in (1, 2, 3):
        name = f"{point}-{nth}"
        if killed_at(place.work, name, point, nth):
            place.same(name)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("recipe", ["sync", "lockstep", "ranks"])
def test_kills_at_random_of_any_process(started, recipe, part):
    """Driver, engine process (lockstep), rank processes (ranks): 216 in all."""
    place, rng = started(recipe), random.Random(f"{recipe} {part}")
    victims, number = Counter(), 0
    while victims.total() < 24:
        name, number = f"random-{part}-{number}", number + 1
        victims += killed_at_random(place.work, name, rng, kills=rng.randint(2, 6), seconds=place.seconds)
        place.same(name)
    print(recipe, dict(victims), "in", number, "runs")
    if recipe != "sync":
        assert victims["child"] >= 1
