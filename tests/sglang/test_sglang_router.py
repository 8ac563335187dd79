"""SGLang's own router before the real server: the engine keeps every promise, and nothing is lost, doubled or open."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_server import Loop, RawServer
from served_engine import EPOCH, PROMPT, assert_holds, begin, computing, load, request, whole
from served_router import routed

from slime_core.engines.sglang import ports
from slime_core.engines.sglang.http import Transport
from slime_core.engines.sglang.installation import Installation, read_installation
from slime_core.engines.sglang.pulse import Limits
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase, EngineCheck
from slime_core.types import WeightUpdate

pytestmark = pytest.mark.system

LONG = 100.0


@pytest.fixture(scope="module")
def installation(sglang_python: str) -> Installation:
    """SGLang of these tests, with its router."""
    found = read_installation(sglang_python, {})
    assert found.router, "sglang-router of constraints-sglang.txt is not installed there"
    return found


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_an_engine_behind_sglangs_router(
    check: EngineCheck, server: RawServer, installation: Installation, served_model: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with routed([server.server], installation, served_model, tmp_path) as run:

            def update(version: int) -> WeightUpdate:
                handle = {"folder": str(served_model)}
                return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle=handle)

            await check(EngineCase(engine=run.engine, update=update, prompt=list(PROMPT)))
            assert not [note for note in run.notes if "restart" in note], run.notes

    server.loop.run(work(), LONG)
