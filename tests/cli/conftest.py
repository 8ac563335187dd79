"""Run `slime` inside the test process, in a folder of its own; a small model, rows and a reward to train on."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_cli.main import main
from slime_core.testing import tiny_model

REWARD = '''
import os
import signal

async def reward(args, sample, **kwargs):
    """A number that hardly two responses share; the sample that HALT names asks the process to stop."""
    name, _, number = os.environ.get("HALT", "").partition(" ")
    if sample.id == name:
        os.kill(os.getpid(), getattr(signal, number or "SIGTERM"))
    return sum(place * ord(char) for place, char in enumerate(sample.response, 1)) % 101 / 101
'''


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Call `slime ARGS` in an empty folder; the answer has code, out and err."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args):
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        caught = capsys.readouterr()
        return Done(code, caught.out, caught.err)

    return call


@dataclass
class Own:
    """A user's own model, rows and reward, in one folder."""

    path: Path

    @property
    def flags(self):
        """A run of four short steps, a checkpoint every second one."""
        return (
            *("--hf-checkpoint", self.path / "model", "--prompt-data", self.path / "my.jsonl"),
            *("--input-key", "question", "--label-key", "answer", "--custom-rm-path", f"{self.path}/judge.py:reward"),
            *("--rollout-shuffle", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "4"),
            *("--rollout-max-response-len", "6", "--lr", "1e-2", "--cpu-threads", "1", "--rollout-slots", "8"),
            *("--save-interval", "2", "--dtype", "float32"),
        )


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model folder of a few thousand parameters."""
    path = tmp_path_factory.mktemp("model") / "model"
    tiny_model(path)
    return path


@pytest.fixture(scope="session")
def make_own(tmp_path_factory, model):
    """Files to train on, in a new folder."""

    def make():
        path = tmp_path_factory.mktemp("own")
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(5)]
        (path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "judge.py").write_text(REWARD)
        (path / "model").symlink_to(model)
        return Own(path)

    return make


@pytest.fixture
def own(make_own):
    """Files to train on, which a test may change."""
    return make_own()


@pytest.fixture
def halted(cli, own, monkeypatch):
    """A run that SIGTERM stopped in its third step; the folder is `cut`."""
    monkeypatch.setenv("HALT", "main/4-0")
    done = cli("run", *own.flags, "--run-dir", "cut")
    assert done.code == 75, done.err
    monkeypatch.delenv("HALT")
    return Path("cut").absolute()
