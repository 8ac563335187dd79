"""The engine over the real server keeps every promise of the protocol, with weights by disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from raw_server import RawServer
from served_engine import keep_contract

from slime_core.testing.contracts import ENGINE_CHECKS, EngineCheck

pytestmark = pytest.mark.system


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_sglang_engine(check: EngineCheck, server: RawServer, served_model: Path, tmp_path: Path) -> None:
    server.loop.run(keep_contract(check, server.server, served_model, tmp_path), 100)
