"""A ledger for a test body, closed whatever happens."""

import asyncio

import pytest
from books import recount
from ledger_audit import audit

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


@pytest.fixture
def use(tmp_path):
    """Run an async test body with a ledger, and check at its end that the books balance, row by row."""

    def run(body, *, folder=tmp_path):
        async def go():
            ledger = SqliteLedger(folder)
            try:
                answer = await body(ledger)
                counts = dict(await ledger.counts())
            finally:
                await ledger.close()
            assert counts == recount(folder)
            dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
            assert counts["issued"] == counts["trained"] + counts["pending"] + dropped
            return answer

        return asyncio.run(go())

    return run
