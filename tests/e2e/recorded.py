"""A run in this process, and what its metrics and its ledger have of its steps."""

import asyncio
import json

import torch
from safetensors.torch import load_file

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


def alike(run, other, steps):
    """Fail unless a run drew the tokens of another and ended in its weights, but for the order in which ranks add up."""
    (drawn, counts), (expected, expected_counts) = steps_of(run, steps), steps_of(other, steps)
    assert counts == expected_counts
    for step, reference in zip(drawn, expected, strict=True):
        assert [(s.id, s.tokens, s.reward) for s in step] == [(s.id, s.tokens, s.reward) for s in reference]
    tensors, expected = (load_file(folder / "final" / "model.safetensors") for folder in (run, other))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            tensors[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}"
        )
