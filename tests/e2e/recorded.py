"""What a run's ledger has of its steps."""

import asyncio

from slime_core.ledger.ledger import SqliteLedger


def steps_of(run, steps):
    """The samples of every step in the order in which it trained on them, and the counts; nothing is lost."""

    async def read():
        ledger = SqliteLedger(run)
        try:
            found = [await ledger.samples(await ledger.composition(version)) for version in range(1, steps + 1)]
            return found, dict(await ledger.counts())
        finally:
            await ledger.close()

    found, counts = asyncio.run(read())
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    assert counts["issued"] == counts["trained"] + dropped + counts["pending"]
    return found, counts
