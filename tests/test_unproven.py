"""What a machine cannot prove is named by the suite and refused by CI; tests that share a server share a worker."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
SERVED = "plugins/slime_sglang/tests/served/test_facts.py"
ENVIRONMENTS = "plugins/slime_verifiers/tests/test_verifiers_failures.py"
OTHERS = "tests/unit/config/test_dump.py"


@pytest.fixture(scope="module")
def without_environments(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Some of the suite, as `make test` runs it, where neither SGLang nor verifiers could be installed."""
    missing = str(tmp_path_factory.mktemp("none") / "python")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", OTHERS, SERVED, ENVIRONMENTS]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"SLIME_SGLANG_PYTHON": missing, "SLIME_ENVIRONMENTS_PYTHON": missing}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("file", "package", "target"), [(SERVED, "SGLang", "sglang"), (ENVIRONMENTS, "verifiers", "environments")]
)
def test_the_suite_goes_on_without_an_environment_and_names_every_test_that_it_left_out(
    without_environments: subprocess.CompletedProcess[str], file: str, package: str, target: str
) -> None:
    said = without_environments.stdout
    assert without_environments.returncode == 0, said + without_environments.stderr
    left = re.findall(rf"^not proven: ({file}::\S+) \(no {package}: .*`make {target}` installs it\)$", said, re.M)
    tests = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(), flags=re.M)
    assert {name.partition("::")[2].partition("[")[0] for name in left} == set(tests)
    assert re.search(rf"=+ \d+ passed, {said.count('not proven: plugins/')} skipped", said)


def test_tests_with_the_server_come_first_and_stay_in_one_worker_while_others_spread(
    without_environments: subprocess.CompletedProcess[str],
) -> None:
    done = re.findall(r"^\[(gw\d)\] \[ *\d+%\] (?:PASSED|SKIPPED) (\S+)", without_environments.stdout, re.M)
    served = [worker for worker, name in done if name.startswith(SERVED)]
    others = [worker for worker, name in done if name.startswith(OTHERS)]
    assert len(set(served)) == 1
    assert len(others) > 1
    assert set(others) - set(served), "the other worker stood still"


@pytest.mark.nightly
def test_without_megatron_every_test_of_its_formats_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['megatron'] = None\n")
    files = ["plugins/slime_megatron/tests/test_dist_megatron.py", "plugins/slime_megatron/tests/test_saving.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    done = subprocess.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True)
    left = re.findall(r"^not proven: (\S+) \(no megatron-core; .*\)$", done.stdout, re.M)
    assert {name.partition("::")[0] for name in left} == set(files), done.stdout
    assert re.search(rf"=+ {len(left)} skipped", done.stdout), "some were run"


@pytest.mark.parametrize(
    ("said", "code"),
    [("", 0), ("not proven: plugins/slime_sglang/tests/served/test_facts.py::test_a (no SGLang)\n", 1)],
    ids=["all proven", "one test left out"],
)
def test_ci_refuses_what_was_not_proven(tmp_path: Path, said: str, code: int) -> None:
    """`.ci/run` with a `make` and a Python that always succeed."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    closing = "===== 3 passed, 1 skipped in 2.00s ====="
    write(tmp_path / "bin" / "make", f"printf '%s' '{said}'\necho '{closing}'\n")
    write(tmp_path / ".venv" / "bin" / "python", "exit 0\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([tmp_path / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
    assert done.stdout.splitlines()[-1] == closing
    assert (f"failed: {said.strip()}" in done.stdout.splitlines()) == bool(said)


def write(file: Path, script: str) -> None:
    """An executable of a few lines."""
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{script}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
