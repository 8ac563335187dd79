"""Run `slime` inside the test process, in a folder of its own."""

from dataclasses import dataclass

import pytest

from slime_cli.main import main


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
