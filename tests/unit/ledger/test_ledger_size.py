"""A large ledger: bytes a row, growth in proportion, and an opening that reads no row."""

import asyncio
import sqlite3

import pytest

from durability.large_ledger import fill_ledger
from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


def size(path):
    db = sqlite3.connect(path)
    ((pages, page),) = db.execute("SELECT page_count, page_size FROM pragma_page_count, pragma_page_size").fetchall()
    db.close()
    return pages * page


def test_a_sample_takes_less_than_300_bytes_and_the_file_grows_in_proportion(tmp_path):
    """200,000 samples of eight a prompt, trained, payloads pruned; a twentieth is dropped."""
    asyncio.run(SqliteLedger(tmp_path).close())
    path = tmp_path / "ledger.sqlite"
    fill_ledger(path, 100_000)
    half = size(path)
    fill_ledger(path, 100_000)
    assert size(path) < 300 * 200_000
    assert size(path) == pytest.approx(2 * half, rel=0.1)

    async def look():
        ledger = SqliteLedger(tmp_path)
        counts = dict(await ledger.counts())
        assert counts["issued"] == 200_000
        assert counts["trained"] + counts["dropped/equal_rewards"] == 200_000
        assert await audit(ledger) == []
        await ledger.close()

    asyncio.run(look())


def test_opening_and_the_calls_of_a_step_scan_no_table_of_samples(tmp_path):
    """Whatever SQLite plans to read in whole is small: names of reasons, counts, turns."""
    asyncio.run(SqliteLedger(tmp_path).close())
    queries = set()

    async def body():
        ledger = SqliteLedger(tmp_path)
        db = ledger.commits.db
        await ledger.commits.run(lambda: db.set_trace_callback(queries.add))
        groups = [sample_group(i) for i in range(4)]
        await ledger.issue(groups)
        await ledger.suspend({"main/0-0": suspended_turns("x")})
        for group in groups:
            await ledger.finish(group)
        await ledger.journal_step(1, "main", ["main/0-0", "main/0-1"])
        await ledger.trained(1, "f")
        await ledger.drop([(groups[1].samples, Drop(reason="x"))])
        await ledger.groups(["main/0", "main/3"])
        await ledger.suspended(["main/0-0"], 5)
        await ledger.samples(["main/2-0"])
        await ledger.rewind(0)
        await ledger.prune(1)
        await ledger.composition(1)
        await ledger.counts()
        await ledger.commits.run(lambda: db.set_trace_callback(None))
        await ledger.close()

    asyncio.run(body())
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    planned = [query for query in queries if query.split()[0] in ("SELECT", "INSERT", "UPDATE", "DELETE")]
    steps = {row[3] for query in planned for row in db.execute(f"EXPLAIN QUERY PLAN {query}")}
    db.close()
    assert len(planned) > 30
    scans = {step for step in steps if step.startswith("SCAN") and not step.startswith("SCAN CONSTANT")}
    allowed = ("tally", "reasons", "turns", "arrays", "living")
    assert [step for step in scans if not any(name in step for name in allowed)] == []
