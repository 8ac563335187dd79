"""Real `slime run` processes with torch, killed at every durable boundary and at random: the same `final/`, always.

What belongs to `make test` forks its processes from one that has imported
torch (`tests/forking`); the nightly tests start each as a user does.
"""

import json
import random
import signal
import time
from collections import Counter

import pytest
from processes import Work, killed_at, killed_at_random

from durability.audit import differences
from durability.chaos import tail
from slime_core.failpoints import NAMES

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
