"""Servers that start in an instant: the real launcher and Server around a package that stands in for SGLang."""

import os
import sys
import uuid
from pathlib import Path

import pytest

from slime_sglang import retries
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

STAND_IN = Path(__file__).with_name("stand_in")


@pytest.fixture
def stand_in(tmp_path):
    """Make a server of the stand-in: words of ``--behave``, further arguments of its command line."""

    def make(*behave, number=0, more=(), launch=None, python=sys.executable):
        arguments = ("--behave", ",".join(behave), *map(str, more))
        env = {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"}
        log = tmp_path / "log" / f"engine-{number}.log"
        return Server.launch(
            launch or server_launch(python=python, arguments=arguments, log=log, env=env),
            number=number,
            group="rollout",
        )

    return make


@pytest.fixture
def shared_memory(monkeypatch):
    """What lies in shared memory by the hand of a stand-in that this test has started: its mark is in the name."""
    mark = uuid.uuid4().hex[:8]
    monkeypatch.setenv("STAND_IN_MARK", mark)
    return lambda: {name for name in os.listdir("/dev/shm") if f"sglang_loads_standin_{mark}_" in name}


@pytest.fixture
def short_pauses(monkeypatch):
    """Tests of the client do not wait for the pauses between retries."""
    begin = retries.Retries.__init__
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.005)
    monkeypatch.setattr(
        retries.Retries, "__init__", lambda self, *args, **words: begin(self, *args, **{"pause": 0.005, **words})
    )
