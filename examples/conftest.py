"""What the tests of the examples share: a run of a recipe, and what it scored."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def train(zygote, tmp_path_factory) -> Callable[..., Path]:
    """``train(recipe, *flags)`` is `slime run RECIPE FLAGS` in a process of its own; the answer is the run's folder.

    Give the recipe's whole path: ``train(Path(__file__).with_name("recipe.toml"), "--seed", 3)``. Keywords are
    variables of its environment, but ``hung``: after so many seconds it counts as hanging.
    """

    def run(recipe, *flags, hung=240, **env):
        folder = tmp_path_factory.mktemp(Path(recipe).parent.name)
        done = zygote.slime(folder, "run", recipe, "--run-dir", folder / "run", *flags, cwd=folder, hung=hung, **env)
        assert done.returncode == 0, done.stderr
        return folder / "run"

    return run


@pytest.fixture(scope="module", params=["short", pytest.param("whole", marks=pytest.mark.nightly)])
def length(request) -> str:
    """How long a recipe runs: ``short`` witnesses its parts, ``whole`` is the recipe as it stands, nightly."""
    return request.param


@pytest.fixture(scope="session")
def scores() -> Callable[..., list[float]]:
    """``scores(run, name)`` is the mean reward of every evaluation of the set ``name``, in order of versions."""

    def read(run, name):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = {row["version"]: row["metrics"]["reward/mean"] for row in rows if row.get("name") == name}
        return [found[version] for version in sorted(found)]

    return read
