"""A hook that raises, through the whole loop: who and what it was about is told, and the ledger's rows say so."""

import asyncio
import re
import sqlite3
from contextlib import asynccontextmanager

import pytest

from durability.fake_trainer import FakeTrainer
from slime_core import loop
from slime_core.clusters.colocation import TimeSharing
from slime_core.config.load import load_config
from slime_core.errors import PluginError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing.fakes import CharTokenizer, FakeEngine

pytestmark = pytest.mark.unit

PLUGIN = """
import dataclasses
import numpy as np
import slime_core
from slime_core import Estimator, Loss, Prompt, Reward, Status
from slime_core.hookspecs import hookimpl

FAIL = ""

def bad(position):
    if position == 1:
        raise ValueError("broken on purpose")

class Rows:
    def __len__(self): return 50
    def at(self, position):
        if FAIL == "slime_prompts":
            bad(position)
        return Prompt(id="", position=position, prompt="1+2=", label="3")
    def state(self): return {}

@hookimpl
def slime_prompts(task, ctx): return Rows()

@hookimpl
def slime_reward(group, ctx): return [float(i) for i in range(len(group.samples))]
"""
BROKEN = {
    "slime_prompts": "FAIL = 'slime_prompts'\n",
    "slime_sampling": "@hookimpl\ndef slime_sampling(prompt, ctx):\n    bad(prompt.position)\n    return ctx.sampling\n",
    "slime_generate": "@hookimpl\nasync def slime_generate(group, ctx):\n    bad(group.prompt.position)\n"
    "    for s in group.samples:\n        await ctx.generate(s)\n    return group\n",
    "slime_sample_done": "@hookimpl\ndef slime_sample_done(sample, ctx):\n    bad(sample.group_index)\n",
    "slime_reward": "@hookimpl\ndef slime_reward(group, ctx):\n    bad(group.prompt.position)\n    return [0.0, 1.0]\n",
    "slime_reward_types": "def mine(sample, ctx):\n    bad(sample.group_index)\n    return 0.5 * sample.rollout_id\n"
    "@hookimpl\ndef slime_reward_types(): return {'mine': mine}\ndel slime_reward\n",
    "slime_filter": "@hookimpl\ndef slime_filter(group, ctx):\n    bad(group.prompt.position)\n",
    "slime_rollout": "@hookimpl\ndef slime_rollout(groups, ctx):\n    for g in groups:\n        bad(g.prompt.position)\n"
    "        for s in g.samples:\n            s.append_response([2, 3], [-0.1, -0.1], version=ctx.version)\n"
    "            s.status, s.reward = Status.COMPLETED, float(s.rollout_id % 2)\n    return groups\n",
    "slime_advantage": "def fn(batch, train):\n    bad(batch.version)\n"
    "    return {'advantages': np.ones(len(batch.loss_mask), np.float32)}\n"
    "@hookimpl\ndef slime_advantage(): return [Estimator(name='mine', fn=fn)]\n",
    "slime_batch": "@hookimpl\ndef slime_batch(batch, ctx): bad(batch.version)\n",
    "slime_step_done": "@hookimpl\ndef slime_step_done(report, ctx): bad(report.version)\n",
    "slime_state": "class H:\n    n = 0\n    def load(self, s): pass\n    def state(self):\n        H.n += 1\n"
    "        bad(H.n - 1)\n        return {}\n@hookimpl\ndef slime_state(): return H()\n",
}
OF_GROUPS = ("slime_sampling", "slime_generate", "slime_sample_done", "slime_reward", "slime_reward_types", "slime_filter",
             "slime_rollout")  # fmt: skip
FLAGS = [
    *("--plugin", "fakes", "--num-rollout", "2", "--rollout-batch-size", "3", "--n-samples-per-prompt", "2"),
    *("--rollout-max-response-len", "5", "--hf-checkpoint", ".", "--skip-eval-before-train", "--no-export-final"),
]


def run(tmp_path, install_plugin, hook, *flags):
    """The loop over a real ledger; its rows and counts, and the error that ended it."""
    install_plugin("fakes", PLUGIN + BROKEN[hook])
    more = {"slime_reward_types": ["--rm-type", "mine"], "slime_advantage": ["--advantage-estimator", "mine"]}
    config = load_config(None, [*FLAGS, *more.get(hook, []), *flags])
    plugins, engine, error = load_plugins(config), FakeEngine(), None
    with RunDir.create("fakes", at=tmp_path / "run") as run_dir:
        ledger = SqliteLedger(run_dir.path)
        report = Report(run_dir, config)
        components = RunComponents(
            engines=engine, tokenizer=CharTokenizer(), vocab_size=16, trainer=FakeTrainer(), ledger=ledger,
            devices=TimeSharing(engine),
        )  # fmt: skip

        @asynccontextmanager
        async def fakes(config, plugins, report):
            yield components

        async def work():
            nonlocal error
            try:
                await loop.run(config, plugins, report, cluster=fakes)
            except PluginError as raised:
                error = raised
            return dict(await ledger.counts()), await ledger.close()

        report.start()
        counts, _ = asyncio.run(asyncio.wait_for(work(), 60))
        report.finish()
        plugins.close()
        with sqlite3.connect(ledger.path) as db:
            rows = db.execute(
                "SELECT s.id, s.state, r.name FROM samples s LEFT JOIN reasons r ON r.id = s.reason ORDER BY s.id"
            ).fetchall()
    return counts, rows, error


def conserved(counts):
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    return counts["issued"] == counts["trained"] + counts["pending"] + dropped


@pytest.mark.parametrize("hook", OF_GROUPS)
def test_a_hook_of_groups_that_raises_drops_its_group_where_the_run_says_so(tmp_path, install_plugin, hook):
    """Policy drop; the ledger's rows say dropped(plugin_error), the others train, and nothing is lost."""
    counts, rows, error = run(tmp_path, install_plugin, hook, "--on-plugin-error", "drop")
    assert error is None
    assert conserved(counts)
    assert counts["trained"] == 12
    dropped = {name.split("-")[0] for name, _, reason in rows if reason == "plugin_error"}
    # slime_rollout makes the three groups of a step in one call: all of them are lost with it
    assert dropped == ({"main/0", "main/1", "main/2"} if hook == "slime_rollout" else {"main/1"})
    assert counts["dropped/plugin_error"] == 2 * len(dropped)
    assert counts["pending"] == 0


@pytest.mark.parametrize("hook", OF_GROUPS)
def test_a_hook_of_groups_that_raises_ends_the_run_by_default(tmp_path, install_plugin, hook):
    """Policy fail; plugin, hook, prompt or sample, file and line, and an intact ledger."""
    counts, _, error = run(tmp_path, install_plugin, hook)
    assert (error.code, error.exit_code) == ("PLG56", 4)
    assert f"fakes.{hook}" in error.what
    about = {"slime_rollout": "the rollout of version 0", "slime_reward_types": "sample 'main/1-"}
    about["slime_sample_done"] = "sample 'main/1-0'"
    assert about.get(hook, "prompt 'main/1'") in error.what
    assert "ValueError: broken on purpose" in error.what
    assert re.search(r"fakes_plugin_module\.py:\d+", error.where)
    assert "dist-fakes==1.0" in error.where
    assert "on_plugin_error=drop" in error.fix
    assert conserved(counts)
    assert counts["trained"] == 0


@pytest.mark.parametrize(
    ("hook", "told", "trained"),
    [
        ("slime_advantage", "step 1", 6),
        ("slime_batch", "step 1", 6),
        ("slime_step_done", "step 1", 6),
        ("slime_state", "its state()", 12),
        ("slime_prompts", "default", 0),
    ],
)
def test_a_hook_of_steps_that_raises_ends_the_run_whatever_the_policy(tmp_path, install_plugin, hook, told, trained):
    """There is no group to drop; the step stays in the ledger, journaled where it came so far."""
    counts, _, error = run(tmp_path, install_plugin, hook, "--on-plugin-error", "drop")
    assert error.code == ("PLG64" if hook == "slime_state" else "PLG56")
    assert hook in error.what
    assert told in error.what + error.where
    assert "broken on purpose" in error.what
    assert "on_plugin_error" not in error.fix
    assert conserved(counts)
    assert counts["trained"] == trained
