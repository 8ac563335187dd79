"""A run that was stopped in its middle."""

from pathlib import Path

import pytest


@pytest.fixture
def halted(cli, own, monkeypatch):
    """A run that SIGTERM stopped in its third step; the folder is `cut`."""
    monkeypatch.setenv("HALT", "main/4-0")
    done = cli("run", *own.flags, "--run-dir", "cut")
    assert done.code == 75, done.err
    monkeypatch.delenv("HALT")
    return Path("cut").absolute()
