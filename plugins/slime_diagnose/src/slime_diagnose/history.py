"""What rules look at: the figures, samples and settings of one stage of a run, read from its directory.

    metrics.jsonl   every step and evaluation            samples.jsonl   best and worst samples of some steps
    config.toml     the stage's settings                 ledger.sqlite   reward and length of all samples of late steps

Nothing here needs torch, and nothing is locked: a run that goes on can be read. A stage with several adapters is a
history of each: the steps that it learned in, with its own figures and samples.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.report.history import evaluations_of, open_ledger, steps_of
from slime_core.report.rundir import RunDir

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Row = dict[str, Any]
TERM = re.compile(r"reward/.+/mean")
RECENT = 10  # last steps that say how the run is now
EARLY = 5  # first steps of a stage whose samples are read
VERSION = re.compile(rb'\{"version": (\d+),')
MEMBERS = """SELECT m.version, s.position, s.reward, s.response_length{model}
FROM members m JOIN samples s USING (serial) WHERE m.version > ? AND s.reward IS NOT NULL"""
STEPS = "SELECT version, fingerprint FROM steps WHERE version > ? AND trained ORDER BY version"


class Trained(NamedTuple):
    """A sample that a step trained on."""

    version: int
    position: int  # of its prompt: samples of a version and position are a group
    reward: float
    length: int  # response tokens
    model: str | None = None  # the adapter that made it, of several


@dataclass(frozen=True, kw_only=True)
class History:
    """One stage of a run.

    Example:
        History(name="main", config=config, steps=[{"version": 1, "metrics": {"reward/mean": 0.5}}])
    """

    name: str
    config: Config  # of the stage, with what `auto` stands for
    steps: Sequence[Row]  # lines of metrics.jsonl, by version
    evaluations: Sequence[Row] = ()  # likewise
    samples: Sequence[Row] = ()  # lines of samples.jsonl, of the first `EARLY` and the last `RECENT` steps
    trained: Sequence[Trained] = ()  # all samples of the last `RECENT` steps
    fingerprints: Sequence[str] = ()  # of the weights after each of the last `RECENT` steps
    adapter: str = ""  # of several in the run

    def values(self, name: str) -> list[float]:
        """A metric's finite values, one a step that has it."""
        return [value for row in self.steps if (value := row["metrics"].get(name)) is not None]

    def recent(self, name: str) -> list[float]:
        """Those of the last `RECENT` steps."""
        return [value for row in self.steps[-RECENT:] if (value := row["metrics"].get(name)) is not None]

    def where(self, steps: int = RECENT) -> str:
        """The last steps, in words."""
        rows = self.steps[-steps:]
        return f"step {rows[0]['version']}" + (f" to {rows[-1]['version']}" if len(rows) > 1 else "")

    @property
    def online(self) -> bool:
        """Whether the stage generates its responses and judges them."""
        return not self.config.train.offline

    @property
    def rewarded(self) -> bool:
        """Whether the stage learns from rewards: an offline stage and pure distillation do not."""
        train = self.config.train
        distils = train.opd_kl_coef > 0 or bool(train.algorithm and train.algorithm.distils)
        return self.online and not distils

    @property
    def grouped(self) -> bool:
        """Whether advantages compare the samples of a prompt with each other."""
        algorithm = self.config.train.algorithm
        return self.rewarded and (algorithm is None or algorithm.groups)

    @property
    def trains(self) -> bool:
        """Whether weights change at all."""
        return not self.config.rollout.debug_rollout_only

    @cached_property
    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest reward of any sample so far; equal where there is none."""
        return min(self.values("reward/min"), default=0.0), max(self.values("reward/max"), default=0.0)

    @cached_property
    def terms(self) -> list[str]:
        """Names of the reward's terms."""
        names = {name for row in self.steps for name in row["metrics"] if name.startswith("reward/")}
        return sorted(name[len("reward/") : -len("/mean")] for name in names if TERM.fullmatch(name))

    def samples_of(self, steps: Sequence[Row], rank: str = "") -> list[Row]:
        """Samples of some steps, of a rank or of both."""
        numbers = {row["version"] for row in steps}
        return [row for row in self.samples if row["version"] in numbers and rank in ("", row["rank"])]

    @cached_property
    def groups(self) -> list[list[Trained]]:
        """Samples of the last steps by step and prompt."""
        by_prompt: dict[tuple[int, int], list[Trained]] = defaultdict(list)
        for sample in self.trained:
            by_prompt[sample.version, sample.position].append(sample)
        return list(by_prompt.values())


def read_run(path: Path) -> list[History]:
    """The stages of a run that have a step, in order.

    Raises:
        ConfigError: CFG05 there is no run at ``path``.
    """
    from slime_core.config.load import read, stage_name, stages
    from slime_core.config.presets import settle

    run_dir = RunDir.open(path)
    config = read(run_dir.config, check=False).config
    steps, evaluations = steps_of(run_dir), evaluations_of(run_dir)
    by_stage: dict[str, list[Row]] = defaultdict(list)
    for row in steps:
        by_stage[row["stage"]].append(row)
    sampled = {row["version"] for of_stage in by_stage.values() for row in (*of_stage[:EARLY], *of_stage[-RECENT:])}
    samples = list(_samples(run_dir.samples, sampled))
    names = config.train.lora_adapters if len(config.train.lora_adapters) > 1 else ()
    trained, fingerprints = _ledger(run_dir, steps[-1]["version"] - RECENT if steps else 0, names)
    histories: list[History] = []
    for stage in stages(config):
        stage_steps = by_stage.get(stage_name(stage), [])
        if not stage_steps:
            continue
        first, end = stage_steps[0]["version"], stage_steps[-1]["version"]
        whole = History(
            name=stage_name(stage),
            config=stage.model_copy(update={"train": settle(stage.train)}),
            steps=stage_steps,
            evaluations=[row for row in evaluations if first - 1 <= row["version"] <= end],
            samples=[row for row in samples if first <= row["version"] <= end],
            trained=[sample for sample in trained if first <= sample.version <= end],
            fingerprints=[mark for version, mark in fingerprints if first <= version <= end],
        )
        histories += [of_adapter(whole, name, names) for name in names] or [whole]
    return [history for history in histories if history.steps]


def of_adapter(history: History, adapter: str, names: Sequence[str]) -> History:
    """The part of a stage that is about one adapter of ``names``: a step in which it has no sample is left out."""
    tasks = (*history.config.data.tasks, *history.config.eval.eval_tasks)
    adapters = {task.name: task.adapter for task in tasks}
    return replace(
        history,
        adapter=adapter,
        steps=[
            {**row, "metrics": _own_metrics(row["metrics"], adapter, names)}
            for row in history.steps
            if f"{adapter}/rollout/samples" in row["metrics"]
        ],
        evaluations=[row for row in history.evaluations if (adapters.get(row["name"]) or names[0]) == adapter],
        samples=[row for row in history.samples if (row.get("model") or names[0]) == adapter],
        trained=[sample for sample in history.trained if (sample.model or names[0]) == adapter],
    )


def _own_metrics(metrics: Mapping[str, float], adapter: str, names: Sequence[str]) -> dict[str, float]:
    """An adapter's metrics without its name, and those of the run that no adapter has by itself."""
    by_adapter = {key: key.partition("/")[2] for key in metrics if key.partition("/")[0] in names}
    of_run = {key: value for key, value in metrics.items() if key not in {*by_adapter, *by_adapter.values()}}
    return of_run | {name: metrics[key] for key, name in by_adapter.items() if key.startswith(f"{adapter}/")}


def _samples(path: Path, versions: set[int]) -> Iterator[Row]:
    """Lines of samples.jsonl that belong to ``versions``; the others are not parsed."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                match = VERSION.match(line)
                if match and int(match[1]) in versions and line.endswith(b"\n"):
                    yield json.loads(line)


def _ledger(run_dir: RunDir, after: int, adapters: Sequence[str]) -> tuple[list[Trained], list[tuple[int, str]]]:
    """Samples and fingerprints of the steps after version ``after``; none where the ledger cannot be read."""
    try:
        with closing(open_ledger(run_dir)) as database:
            query = MEMBERS.format(model=", s.model" if adapters else "")  # a column that older ledgers have not
            trained = [Trained(*row) for row in database.execute(query, (after,))]
            return trained, database.execute(STEPS, (after,)).fetchall()
    except sqlite3.Error:
        return [], []
