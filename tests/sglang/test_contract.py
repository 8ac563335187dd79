"""The engine over the real server keeps every promise of the protocol, with weights by disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raw_server import RawServer
from served_engine import EPOCH, PROMPT, serving

from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase, EngineCheck
from slime_core.types import WeightUpdate

pytestmark = pytest.mark.system


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_sglang_engine(check: EngineCheck, server: RawServer, served_model: Path, tmp_path: Path) -> None:
    async def work() -> None:
        notes: list[str] = []
        async with serving(server.server, served_model, tmp_path, notes) as engine:

            def update(version: int) -> WeightUpdate:
                handle = {"folder": str(served_model)}
                return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle=handle)

            await check(EngineCase(engine=engine, update=update, prompt=list(PROMPT)))
            assert not [note for note in notes if "restart" in note], json.dumps(notes)

    server.loop.run(work(), 100)
