"""What travels to a Ray cluster's machines, and what holds there: a plugin's wheel, variables, threads, the token."""

import json
import subprocess
import sys
import zipfile

import pytest
from ray_nodes import ray_cluster
from recorded import steps_of
from small_task import write_task

pytest.importorskip("ray", reason="not proven: Ray is not installed")
pytestmark = pytest.mark.system

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "slime-far"
version = "1.2"
dependencies = ["slime-rl>=0.1"]
[project.entry-points."slime.plugins"]
far = "slime_far.plugin"
[tool.hatch.build.targets.wheel]
packages = ["slime_far"]
"""
PLUGIN = '''
"""A reward that looks at the run's processes, and a loss that says where a rank found it, and with how many threads."""
import json
import os
from pathlib import Path

from slime_core import Loss, hookimpl

SEEN = Path(os.environ.get("SLIME_TEST_SEEN", "/dev/null"))


def threads_of(words):
    """OMP_NUM_THREADS of the processes of these words that bear our variable."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode().replace("\\0", " ")
            env = (entry / "environ").read_bytes().decode(errors="replace").split("\\0")
        except OSError:
            continue
        if words in line and f"SLIME_TEST_SEEN={SEEN}" in env:
            found += [word.partition("=")[2] for word in env if word.startswith("OMP_NUM_THREADS=")]
    return found


@hookimpl
def slime_reward(group, ctx):
    told = {kind: threads_of(f"slime_core.clusters.{kind}") for kind in ("rank", "engine_process")}
    (SEEN / "processes").write_text(json.dumps(told))
    return [sum(map(str.isdigit, sample.response)) / (1 + len(sample.response)) for sample in group.samples]


def far(log_probs, entropy, columns, train):
    import torch

    (SEEN / "rank").write_text(json.dumps({"file": __file__, "threads": torch.get_num_threads()}))
    return -columns["advantages"] * log_probs, {}


@hookimpl
def slime_loss():
    return [Loss(name="far", fn=far, columns=("advantages",))]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("travel"), "")


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def wheel(work):
    """A plugin's wheel, as its author builds it; what it requires no index here has."""
    return build(work / "project", PLUGIN)


def build(project, plugin):
    (project / "slime_far").mkdir(parents=True)
    (project / "slime_far" / "__init__.py").write_text("")
    (project / "slime_far" / "plugin.py").write_text(plugin)
    (project / "pyproject.toml").write_text(PROJECT)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=project, check=True)
    return next((project / "dist").iterdir())


@pytest.fixture(scope="module")
def installed(work, wheel):
    """Where the driver alone finds the plugin: a folder on its path that no environment names."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site")
    return work / "site"


@pytest.fixture
def run(work, nodes, installed, forked_slime):
    """`slime run` with the plugin on the cluster; the answer, the run directory, and the folder of proofs."""

    def run(name, *flags):
        seen = work / f"seen-{name}"
        seen.mkdir()
        given = (
            *("--plugin", "far", "--loss-type", "far", "--hf-checkpoint", work / "model", "--seed", 4),
            *("--prompt-data", work / "rows.jsonl", "--input-key", "q", "--label-key", "a", "--dtype", "float32"),
            *("--num-rollout", 1, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--device", "cpu"),
            *("--rollout-max-response-len", 8, "--cpu-threads", 2, "--cluster", "ray", "--run-dir", work / name),
            *("--max-restarts", 0, "--ray-address", nodes.address),
            *("--ray-env-vars", json.dumps({"SLIME_TEST_SEEN": str(seen)})),
        )
        env = {**nodes.env, "SLIME_TEST_SEEN": str(seen), "OMP_NUM_THREADS": "2"}
        return forked_slime("run", *given, *flags, path=[installed], timeout=280, **env), work / name, seen

    return run


@pytest.mark.nightly
def test_a_plugin_is_found_through_its_wheel_and_every_process_has_its_threads(run, wheel):
    done, path, seen = run("far", "--ray-py-modules", wheel)
    assert done.returncode == 0, done.stderr
    assert "plugins that travel: far" in done.stderr
    rank = json.loads((seen / "rank").read_text())
    assert "/runtime_resources/py_modules_files/" in rank["file"]
    assert rank["threads"] == 2
    assert json.loads((seen / "processes").read_text()) == {"rank": ["2"], "engine_process": ["2"]}
    assert steps_of(path, 1)[1]["trained"] == 4


@pytest.mark.nightly
def test_a_rank_without_the_wheel_or_with_another_of_that_version_is_refused(run, work):
    without, _, _ = run("without")
    assert without.returncode == 4, without.stderr
    assert "error PLG51  no plugin named 'far' is installed" in without.stderr
    other = build(work / "other", PLUGIN.replace("-columns", "-2 * columns"))
    mixed, _, _ = run("mixed", "--ray-py-modules", other)
    assert mixed.returncode == 4, mixed.stderr
    assert "rank 0 loaded other plugins than the driver" in mixed.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("env", "told"),
    [
        pytest.param({"RAY_AUTH_MODE": "disabled"}, "the cluster requires a different token", id="none"),
        pytest.param({"RAY_AUTH_TOKEN": "f" * 64}, "the cluster requires a different token", id="another"),
        pytest.param({"RAY_AUTH_TOKEN": "", "HOME": "/nowhere"}, "no authentication token", id="not there"),
    ],
)
def test_a_cluster_whose_token_this_process_lacks_says_so(nodes, forked_slime, env, told):
    done = forked_slime("attach", "--address", nodes.address, **{**nodes.env, **env})
    assert done.returncode == 2
    assert f"error CFG17  no Ray cluster can be joined at {nodes.address}" in done.stderr
    assert told in done.stderr.replace("couldn't find an", "no")
    assert "fix: export RAY_AUTH_MODE=token, and the cluster's own token: RAY_AUTH_TOKEN=..." in done.stderr


@pytest.mark.nightly
def test_a_token_that_is_at_hand_is_taken_up_where_no_mode_is_named(nodes, forked_slime):
    env = {name: value for name, value in nodes.env.items() if name != "RAY_AUTH_MODE"}
    done = forked_slime("attach", "--address", nodes.address, "nobody", **env)
    assert "error CFG05" in done.stderr, done.stderr  # let in, and there is no such run
