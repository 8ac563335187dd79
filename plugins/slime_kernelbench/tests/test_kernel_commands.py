"""The commands with the real judge: `eval` in this process, and `serve` as a process that judges, drains and dies."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from judge_services import Server, invoke

from slime_kernelbench.problems import answer

pytestmark = pytest.mark.integration

ADD = answer("add")
CHEAT = """\
import torch


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return a + b
"""
README = (Path(__file__).parents[1] / "README.md").read_text()
KERNELS = {
    "cheat.py": CHEAT,
    "readme.py": README.split("```python\n")[1].split("```")[0],
    "right.py": ADD,
    "wrong.py": ADD.replace("a + b, mask", "a - b, mask"),
}
SLOW = ADD.replace("offsets = ", "for _ in range(1000000000):\n        pass\n    offsets = ", 1)


@pytest.fixture
def kernels(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, source in KERNELS.items():
        (folder / name).write_text(source)
    return folder


def statuses(done):
    return {Path(row["file"]).name: (row["status"], row["correct"]) for row in json.loads(done.stdout)}


EXPECTED = {
    "cheat.py": ("rejected", False),
    "readme.py": ("correct", True),
    "right.py": ("correct", True),
    "wrong.py": ("wrong", False),
}


def test_eval_judges_files_in_the_sandbox(kernels):
    done = invoke("eval", kernels, "--json")
    assert statuses(done) == EXPECTED
    assert done.exit_code == 1
    rows = {Path(row["file"]).name: row for row in json.loads(done.stdout)}
    assert rows["cheat.py"]["flags"] == ["torch_computes"]
    assert rows["right.py"]["flags"] == []
    assert rows["right.py"]["sandbox"] in ("strong", "medium")


def test_a_served_judge_says_the_same_and_ends_with_everything_of_it(kernels, tmp_path):
    with Server.real(tmp_path / "judge", "--workers", "1") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert statuses(server.eval(kernels)) == EXPECTED
        numbers, secret = below(server.process.pid), tmp_path / "judge" / "secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        shown = [Path(f"/proc/{pid}/{file}") for pid in numbers[:2] for file in ("cmdline", "environ")]
        assert all(secret.read_bytes().hex().encode() not in file.read_bytes() for file in shown)
        everything = held(numbers)
        assert len(everything) >= 3  # the server, its worker, the fork server of the sandbox
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert_ended(everything)


@pytest.mark.nightly
def test_a_served_judge_that_is_killed_at_work_leaves_no_process(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with Server.real(tmp_path / "judge", "--workers", "1") as server:
        assert statuses(server.eval(write(tmp_path / "right.py", ADD))) == {"right.py": ("correct", True)}
        warm = set(below(server.process.pid))
        words = [sys.executable, "-m", "slime_cli.main", "kernelbench", "eval", str(tmp_path / "slow.py")]
        environment = {**os.environ, "SLIME_KERNELBENCH_TOKEN": server.token}
        asking = subprocess.Popen([*words, "--url", server.url, "--json"], stdout=subprocess.PIPE, env=environment)
        try:
            while not (new := set(below(server.process.pid)) - warm):
                assert asking.poll() is None, "the candidate was judged before it began"
            everything = held(warm | new)
            server.process.kill()
            rows = json.loads(asking.communicate(timeout=60)[0])
            assert (rows[0]["status"], asking.returncode) == ("infra", 1)
            assert_ended(everything)
        finally:
            asking.kill()
            asking.communicate()


def write(path, source):
    path.write_text(source)
    return path


def below(pid):
    """A process and all that came of it, by number."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in children.read_text().split()] if children.exists() else []
    return [pid, *(each for child in found for each in below(child))]


def held(pids):
    """Descriptors of those processes that have not ended yet: a number alone may be another's later."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def assert_ended(descriptors):
    """Every process ends in time."""
    try:
        assert [number for number in descriptors if not select.select([number], [], [], 20)[0]] == []
    finally:
        for number in descriptors:
            os.close(number)
