"""A run in this process, and what its metrics and its ledger have of its steps."""

import asyncio
import json

from slime_core import loop
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.report import Report
from slime_core.report.rundir import RunDir


def run_here(folder, config, **parts):
    """Run a config to its end in ``folder``; ``parts`` are those of `loop.run`. The metrics of its steps."""
    plugins = load_plugins(config)
    with RunDir.create(folder.name, at=folder) as run_dir:
        report = Report(run_dir, config)
        report.start()
        try:
            asyncio.run(loop.run(config, plugins, report, **parts))
        finally:
            report.finish()
            plugins.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line.get("kind") == "step"]


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
