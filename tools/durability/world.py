"""A run without torch: the real loop, collector, ledger, checkpoints, run directory, data and plugins.

Two classes differ from a run of `slime run`: the trainer, whose step is a hash of everything it is given, and the
engine, whose tokens are a hash of the seed, the position and the weights. One bit of difference anywhere in a batch,
in the order of its samples, in a restored state or in the weights that an engine serves is another `final/`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from durability.audit import Audit, audit, differences
from durability.chaos import ask, run_child, survive, tail
from durability.fake_trainer import FakeTrainer
from slime_cli.starts import begin, end
from slime_cli.trim import trim_figures
from slime_core import durable, loop
from slime_core.checkpoint import Checkpoints
from slime_core.clusters.colocation import DedicatedDevices, TimeSharing
from slime_core.clusters.engine_set import as_one, engine_reservation
from slime_core.config.load import load_config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins import load_plugins
from slime_core.protocols import RunComponents
from slime_core.report.report import Report
from slime_core.report.rundir import RunDir
from slime_core.seeds import seed_of
from slime_core.testing.fakes import CharTokenizer, FakeEngine, checksum

PLUGINS = Path(__file__).parent / "plugins"
VOCAB = 17
BASE = {
    "plugin": "chaos",
    "advantage_estimator": "against_average",
    "num_rollout": 6,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 6,
    "save_interval": 2,
    "ledger_keep_steps": 1,
    "cpu_threads": 1,
    "device": "cpu",
    "dtype": "float32",
    "hf_checkpoint": ".",
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A shape of run. ``exact``: killed anywhere, it ends in the same weights."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    stages: str = ""
    exact: bool = True
    drops: bool = False
    stored_stand: bool = True  # what is finished is never asked for again; a race may have to run it to rank it


AHEAD = {"no_colocate": True}
AHEAD_OF_A_CHECKPOINT = ("rollout/issued_groups", "rollout/dropped_samples", "dropped/")
"""Counts of what ran ahead: a step that is made again counts what was issued before its checkpoint in another step."""
OVER = {"over_sampling_batch_size": 6, "partial_rollout": True, "rollout_max_response_len": 24}
STAGES = """
[[eval.eval_tasks]]
name = "default"

[[stage]]
name = "warmup"
loss_type = "sft_loss"
num_rollout = 3
n_samples_per_prompt = 1

[[stage]]
name = "main"
num_rollout = 4
eval_interval = 2
"""
BESIDE = {**AHEAD, "max_staleness": 1, "eval_async": True, "rollout_num_engines": 2, "eval_interval": 2}
EVALUATED = """
[[eval.eval_tasks]]
name = "default"
"""
SCENARIOS = {
    item.name: item
    for item in (
        Scenario(name="sync"),
        Scenario(name="drops", drops=True),
        Scenario(name="turns", plugins=("chaos_turns",)),
        Scenario(name="stages", stages=STAGES, keys={"num_rollout": 4}),
        Scenario(name="over", keys=OVER, drops=True, stored_stand=False),
        Scenario(name="lockstep", keys={**AHEAD, "max_staleness": 1}, drops=True),
        Scenario(name="lockstep2", keys={**AHEAD, "max_staleness": 2}, plugins=("chaos_turns",)),
        Scenario(name="beside", keys=BESIDE, stages=EVALUATED, drops=True),
        Scenario(name="free", keys={**AHEAD, "max_staleness": 1, "async_schedule": "free"}, drops=True, exact=False),
        Scenario(name="free_over", keys={**OVER, "async_schedule": "free"}, exact=False, stored_stand=False),
    )
}


class HashTrainer(FakeTrainer):
    """The step is a hash of the weights, the optimizer's state and every column of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum = b""
        self._files: dict[str, bytes] = {}
        self._folder = Path()

    async def begin(self, stage: Any) -> None:
        await super().begin(stage)
        self.momentum = stage.train.loss_type.encode()

    async def step(self, batch: Any) -> dict[str, float]:
        await super().step(batch)
        self.batches.clear()  # a soak counts bytes
        parts: list[Any] = [self.momentum, *(w.tobytes() for w in self.weights.values())]
        parts += [json.dumps([batch.stage, batch.version, batch.sample_ids, batch.tasks]).encode()]
        parts += [batch.reward, batch.tokens, batch.offsets, batch.loss_mask, batch.response_offsets]
        parts += [batch.group, batch.rollout]
        parts += [column for _, column in sorted(batch.columns.items())]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
        self.momentum = digest.digest()
        numbers = np.frombuffer(digest.digest(), dtype="<u4").astype(np.float64) / 2**32
        self.weights = {"embed": numbers[:4].copy(), "head": numbers[4:].copy()}
        return {"loss": float(numbers[0])}

    async def fingerprint(self) -> str:
        return ",".join(checksum(w) for w in self.weights.values())

    async def save(self, path: Path) -> None:
        path.mkdir()
        weights = {name: w.tolist() for name, w in self.weights.items()}
        self._folder = path
        self._files = {
            "weights.json": json.dumps(weights).encode(),
            "optimizer.json": json.dumps({"momentum": self.momentum.hex(), "stages": self.stages}).encode(),
        }

    async def saved(self) -> dict[str, durable.FileMark]:
        return await asyncio.to_thread(self._write)

    def _write(self) -> dict[str, durable.FileMark]:
        marks = {name: durable.write_file(self._folder / name, [data]) for name, data in self._files.items()}
        durable.disk.sync_folder(self._folder)
        return marks

    async def restore(self, path: Path) -> None:
        weights = json.loads((path / "weights.json").read_bytes())
        self.weights = {name: np.array(w) for name, w in weights.items()}
        state = json.loads((path / "optimizer.json").read_bytes())
        self.momentum = bytes.fromhex(state["momentum"])

    async def export(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        weights = {name: w.tolist() for name, w in self.weights.items()}
        (path / "model.json").write_text(json.dumps({"weights": weights, "momentum": self.momentum.hex()}))


class HashEngine(FakeEngine):
    """Tokens are a function of the seed, the position and the weights that are served."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
        self._mark = ""

    async def load(self, update: Any) -> None:
        await super().load(update)
        self.served.clear()
        self._mark = checksum(self.tensors["head"])

    def _draw(self, request: Any, out: Any) -> None:
        super()._draw(request, out)
        position = len(request.tokens) + len(out.tokens) - 1
        token = seed_of(request.seed, position, self._mark) % self.vocab_size
        out.tokens[-1] = token
        out.log_probs[-1] = out.plain_log_probs[-1] = -(1.0 + (token * 7 + position) % 13 / 8)


class SlowLedger(SqliteLedger):
    """Answers late that prompts are issued; a run must not depend on it."""

    turns = 0  # of the event loop

    async def issue(self, groups: Sequence[Any]) -> None:
        await super().issue(groups)
        for _ in range(self.turns):
            await asyncio.sleep(0)


def install(folder: Path) -> None:
    """Make the plugins of this folder known to this process, as pip would."""
    for module in ("chaos", "chaos_turns"):
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[slime.plugins]\n{module} = {module}_plugin\n")
    for path in (str(PLUGINS), str(folder)):
        if path not in sys.path:
            sys.path.insert(0, path)


class World:
    """One run of a scenario in a folder of its own, started and resumed in this process or a forked one."""

    def __init__(
        self, scenario: Scenario, folder: Path, *, seed: int = 3, steps: int = 0, sinks: Sequence[Any] = ()
    ) -> None:
        self.scenario, self.folder, self.seed, self.steps, self.sinks = scenario, folder, seed, steps, sinks
        self.run_dir = folder / "run"
        self.asked = folder / "asked.txt"  # a line a reward that was asked for
        self.log = folder / "log.txt"
        self.slow = 0
        folder.mkdir(parents=True, exist_ok=True)

    def config(self) -> Any:
        scenario = self.scenario
        recipe = self.folder / "recipe.toml"
        recipe.write_text(scenario.stages)
        keys = {**BASE, **scenario.keys, "seed": self.seed} | ({"num_rollout": self.steps} if self.steps else {})
        words = []
        for name, value in keys.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        for plugin in scenario.plugins:
            words += ["--plugin", plugin]
        words += [f"plugin.chaos.asked={self.asked}"]
        words += ["plugin.chaos.drops=true"] if scenario.drops else []
        return load_config(recipe, words)

    def start(self, resume: bool) -> None:
        """Make the run, or go on with it, to its end: what `slime run` does around `loop.run`."""
        asyncio.run(self._run(resume))

    async def _run(self, resume: bool) -> None:
        config = self.config()
        plugins = load_plugins(config)
        notes: list[str] = []
        if resume and self.run_dir.exists() and not (self.run_dir / "config.toml").exists():
            assert not (self.run_dir / "ledger.sqlite").exists(), "a run that never began has a ledger"
            shutil.rmtree(self.run_dir)  # killed before it had its config: there is nothing to go on with
        again = self.run_dir.exists()
        found = None
        with RunDir.reopen(self.run_dir) if again else RunDir.create("chaos", at=self.run_dir) as run_dir:
            if again:
                checkpoints = Checkpoints(run_dir.checkpoints, keep=config.report.save_keep, note=notes.append)
                found = checkpoints.latest(strict=True)
                run_dir.raise_epoch(found.epoch if found else 0)
                due = found is None or found.state["eval_due"]
                trim_figures(run_dir, found.version if found else 0, evaluations=0 if due else 1)
            begin(run_dir, found.version if found else 0, {})
            report = Report(run_dir, config, self.sinks)
            report.start()
            try:
                version = await loop.run(config, plugins, report, cluster=self.cluster, checkpoint=found)
            finally:
                report.finish()
                plugins.close()
            end(run_dir, "finished", {"version": version})

    @asynccontextmanager
    async def cluster(self, config: Any, plugins: Any, report: Any) -> AsyncIterator[RunComponents]:
        """One class each for engine and trainer; the ledger is the real one."""
        engines = [HashEngine() for _ in range(config.rollout.rollout_num_engines or 1)]
        engine: Any = as_one(engines)
        ledger = SlowLedger(self.run_dir)
        ledger.turns = self.slow
        try:
            yield RunComponents(
                engines=engine,
                tokenizer=CharTokenizer(),
                vocab_size=VOCAB,
                trainer=HashTrainer(),
                ledger=ledger,
                devices=DedicatedDevices() if config.rollout.max_staleness else TimeSharing(engine),
                reserve_engine=engine_reservation(engine),
            )
        finally:
            await ledger.close()

    def look(self) -> dict[str, Any]:
        """The run directory as it lies there, its process dead; also the groups that are out of the engine's hands."""
        if not (self.run_dir / "ledger.sqlite").exists():
            return {"audit": asdict(Audit()), "done": []}
        found = audit(self.run_dir, ended=False)
        with sqlite3.connect(self.run_dir / "ledger.sqlite") as db:
            made = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'samples'").fetchone()[0]
            query = "SELECT id FROM samples GROUP BY id HAVING max(state) > 0"
            names = db.execute(query).fetchall() if made else []  # it may die before it has tables
        db.close()
        return {"audit": asdict(found), "done": sorted({name.rpartition("-")[0] for (name,) in names})}

    def asked_for(self) -> list[str]:
        """Groups whose rewards were asked for so far, in order."""
        return self.asked.read_text().split() if self.asked.exists() else []


def warm(folder: Path, names: Sequence[str] = tuple(SCENARIOS)) -> None:
    """Import what a run imports, so that no fork has to; nothing but imports happens in this process."""

    def modules() -> list[str]:
        for name in names:
            World(SCENARIOS[name], folder / name, steps=2).start(False)
        return list(sys.modules)

    folder.mkdir(parents=True)
    imported: Any = ask(modules, log=folder / "log.txt")
    for name in imported:
        if name not in sys.modules and name != "__main__":
            with suppress(ImportError):
                importlib.import_module(name)
    shutil.rmtree(folder)


def left_alone(scenario: Scenario, folder: Path, seed: int, steps: int = 0) -> dict[str, Any]:
    """The run that nobody kills: its audit, and how long it took."""
    world = World(scenario, folder, seed=seed, steps=steps)
    ended = run_child(lambda: world.start(False), log=world.log)
    if ended.code or ended.left:
        raise RuntimeError(f"the run ended with {ended}:\n{tail(world.log)}")
    found: Any = ask(lambda: asdict(audit(world.run_dir)), log=world.log)
    if found["wrong"]:
        raise RuntimeError(f"the run that was left alone is wrong: {found['wrong']}")
    return {"audit": found, "seconds": ended.seconds}


def killed(
    scenario: Scenario,
    folder: Path,
    seed: int,
    alone: dict[str, Any],
    *,
    rng: random.Random,
    kills: int,
    steps: int = 0,
) -> dict[str, Any]:
    """The same run, killed up to ``kills`` times; ``wrong`` says what is not as it must be."""
    world = World(scenario, folder, seed=seed, steps=steps)
    seen: dict[str, Any] = {"steps": {}, "fingerprints": {}}
    done: set[str] = set()
    asked = 0

    def between() -> list[str]:
        """Every third time: what was recorded stays, and what was finished is not asked for again."""
        nonlocal asked
        if rng.random() < 2 / 3:
            return []
        now: Any = ask(world.look, log=world.log)
        wrong = list(now["audit"]["wrong"]) + _changed(seen, now["audit"])
        again = done.intersection(world.asked_for()[asked:])
        if again and scenario.stored_stand:
            wrong.append(f"rewards asked for again: {sorted(again)}")
        done.update(now["done"])
        asked = len(world.asked_for())
        return wrong

    story = survive(
        world.start, seed=rng.getrandbits(32), seconds=alone["seconds"], kills=kills, log=world.log, between=between
    )
    wrong = story.wrong
    if not wrong:
        found: Any = ask(lambda: asdict(audit(world.run_dir)), log=world.log)
        wrong = list(found["wrong"]) + _changed(seen, found)
        if scenario.exact:
            ignored = AHEAD_OF_A_CHECKPOINT if scenario.keys.get("max_staleness") else ()
            wrong += differences(Audit(**alone["audit"]), Audit(**found), ignored)
        samples = found["counts"].get("issued", 0)
    else:
        samples = 0
    numbers = {"kills": story.kills, "starts": story.starts, "boundaries": story.boundaries}
    return {**numbers, "samples": samples, "wrong": wrong}


def _changed(seen: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What was recorded of a step before and is not so now; ``seen`` then knows of what is new."""
    wrong = []
    for kind in ("steps", "fingerprints"):
        wrong += [
            f"{kind} {v} was {old}, now {now[kind].get(v)}" for v, old in seen[kind].items() if now[kind].get(v) != old
        ]
        seen[kind].update(now[kind])
    return wrong
