"""A ledger for a test body, closed whatever happens."""

import asyncio

import pytest

from durability.ledger_audit import audit
from slime_core.ledger.ledger import SqliteLedger


@pytest.fixture
def with_ledger(tmp_path):
    """Run ``body(ledger)``; rows and payloads are looked at one by one at its end."""

    def run(body, *, folder=tmp_path, sound=True, **kwargs):
        async def go():
            ledger = SqliteLedger(folder, **kwargs)
            try:
                answer = await body(ledger)
                if sound:
                    assert await audit(ledger) == []
                return answer
            finally:
                await ledger.close()

        return asyncio.run(go())

    return run
