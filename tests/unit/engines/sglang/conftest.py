"""Servers that start in an instant: the real launcher and Server around a package that stands in for SGLang."""

import os
import sys
from pathlib import Path

import pytest

from slime_core.engines.sglang.server import Launch, Server

STAND_IN = Path(__file__).with_name("stand_in")


@pytest.fixture
def stand_in(tmp_path):
    """Make a server of the stand-in: words of ``--behave``, further arguments of its command line."""

    def make(*behave, number=0, more=(), launch=None, python=sys.executable):
        arguments = ("--behave", ",".join(behave), *map(str, more))
        env = {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"}
        log = tmp_path / "log" / f"engine-{number}.log"
        return Server.launch(
            launch or Launch(python=python, arguments=arguments, log=log, env=env), number=number, group="rollout"
        )

    return make


@pytest.fixture
def shared_memory():
    """What lies in shared memory by the hand of a stand-in that this test has started."""

    def found():
        return {name for name in os.listdir("/dev/shm") if name.startswith("sglang_loads_standin_")} - before

    before = set()
    before = found()
    return found
