"""`slime plugins new` writes a package that installs, is listed, keeps its promises and trains as it is."""

import json
import os
import subprocess
import sys
import tomllib

import pytest

pytestmark = pytest.mark.integration


def test_the_package_is_written_whole_with_its_own_names(cli, tmp_path):
    done = cli("plugins", "new", "geo_3k", "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert (made["distribution"], made["package"]) == ("slime-geo-3k", "slime_geo_3k")
    folder = tmp_path / "slime-geo-3k"
    assert made["folder"] == str(folder)
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == set(made["files"])
    assert {"pyproject.toml", "README.md", "tests/test_geo_3k.py", "src/slime_geo_3k/plugin.py"} <= on_disk
    assert not [
        p
        for p in folder.rglob("*")
        if p.is_file() and "@" in p.read_text().replace("@hookimpl", "").replace("@pytest", "")
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["slime.plugins"] == {"geo_3k": "slime_geo_3k.plugin"}
    assert tomllib.loads((folder / "src/slime_geo_3k/recipes/default.toml").read_text())["plugins"] == ["geo_3k"]


@pytest.mark.parametrize("name", ["Geo", "geo-3k", "3geo", "class", "../x", "core", "", "run", "attach"])
def test_a_name_that_cannot_be_a_package_is_refused(cli, tmp_path, name):
    done = cli("plugins", "new", name)
    assert done.code == 2
    assert "CFG03" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(cli, tmp_path):
    assert cli("plugins", "new", "geo", "--dir", tmp_path / "made").code == 0
    kept = (tmp_path / "made" / "slime-geo" / "README.md").read_text()
    done = cli("plugins", "new", "geo", "--dir", tmp_path / "made")
    assert done.code == 2
    assert "CFG12" in done.err
    assert (tmp_path / "made" / "slime-geo" / "README.md").read_text() == kept


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that the new plugin is installed into, from its wheel."""
    folder = tmp_path_factory.mktemp("new")
    env = {**os.environ, "NO_COLOR": "1"}
    subprocess.run([sys.executable, "-m", "slime_cli.main", "plugins", "new", "geo"], cwd=folder, env=env, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    options = ["--no-index", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([*map(str, [*pip, *options]), str(folder / "slime-geo")], cwd=folder, check=True)
    return folder


@pytest.mark.system
def test_the_new_plugin_installs_is_listed_and_keeps_its_promises(slime, site):
    listed = json.loads(slime("plugins", "list", "--json", path=[site / "site"]).stdout)["plugins"]
    assert {"name": "geo", "distribution": "slime-geo", "version": "0.1.0"}.items() <= next(
        row for row in listed if row["name"] == "geo"
    ).items()
    checked = slime("plugins", "check", "geo", path=[site / "site"])
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.system
def test_the_new_plugins_own_tests_pass(site):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(site / "slime-geo")],
        env={**os.environ, "PYTHONPATH": str(site / "site"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


@pytest.mark.system
def test_the_new_plugin_trains_as_it_is(forked_slime, site, tmp_path):
    done = forked_slime(
        *("run", "--plugin", "geo", "--num-rollout", "12", "--cpu-threads", "1", "--run-dir", "out", "--json"),
        path=[site / "site"],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["metrics"]["reward/mean"] for line in lines if line["kind"] == "step"]
    assert len(rewards) == 12
    assert rewards[-1] > rewards[0] + 0.1
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["sglang", "rollout", "local", "fsdp"])
def test_a_backend_is_not_called_as_a_table_or_backend_of_slime(cli, tmp_path, name):
    done = cli("plugins", "new", name, "--kind", "engine")
    assert done.code == 2
    assert "CFG03" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def backend_site(tmp_path_factory):
    """A folder with a new engine and a new trainer, both installed."""
    folder = tmp_path_factory.mktemp("backends")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    for kind in ("engine", "trainer"):
        new = [sys.executable, "-m", "slime_cli.main", "plugins", "new", f"own_{kind}", "--kind", kind]
        subprocess.run(new, cwd=folder, check=True)
    options = ["--no-index", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([*pip, *options, "./slime-own-engine", "./slime-own-trainer"], cwd=folder, check=True)
    return folder


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.parametrize(("kind", "count"), [("engine", 10), ("trainer", 8)])
def test_a_new_backend_s_own_tests_are_the_contract_and_pass(backend_site, kind, count):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(backend_site / f"slime-own-{kind}")],
        env={**os.environ, "PYTHONPATH": str(backend_site / "site"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout


@pytest.mark.system
def test_a_run_trains_by_a_new_engine_and_a_new_trainer(forked_slime, backend_site, tmp_path):
    done = forked_slime(
        *("run", "--plugin", "rm_math", "--rollout-engine", "own_engine", "--own-engine-threads", "2"),
        *("--train-backend", "own_trainer", "--own-trainer-report-tokens", "--cpu-threads", "1", "--run-dir", "out"),
        *("stage.warmup.num_rollout=1", "--num-rollout", "1", "--rollout-batch-size", "2", "--heldout-rows", "2"),
        *("--n-samples-per-prompt", "2", "--dtype", "float32"),
        path=[backend_site / "site"],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"]["own_trainer/tokens"] > 0 for line in lines if line["kind"] == "step"] == [True, True]
    assert "not compared byte by byte" in done.stderr
